"""Rules that look for findings in the figures."""
