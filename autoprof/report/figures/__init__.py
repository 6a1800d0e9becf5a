"""Data of a report, computed from the timeline and the captures of a run."""
