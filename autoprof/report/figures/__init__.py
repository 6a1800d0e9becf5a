"""Figures of a run, from its timeline and captures."""
