"""Wrapping of targets' functions: recipes, registry, patching, wrappers, dispatch."""
