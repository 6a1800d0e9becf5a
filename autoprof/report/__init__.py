"""Figures of a run, findings in words, and pages that show them."""
