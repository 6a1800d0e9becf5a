"""Rules that look for findings in the data of a report."""
