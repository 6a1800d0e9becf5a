"""Figures of a run, from what it recorded."""
