"""Runs, steps and stages that a script or a notebook gives by itself, without a recipe."""
