"""Where the time of a run went: figures, findings in words, and pages that show them."""
