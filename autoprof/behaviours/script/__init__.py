"""Runs, steps and stages that a script or a notebook marks itself, without a recipe."""
