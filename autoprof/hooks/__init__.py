"""Hooks on functions of other programs: recipes, registry, patching, wrappers, dispatch."""
