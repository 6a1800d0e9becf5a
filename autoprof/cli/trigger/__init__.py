"""Command `autoprof trigger`: windows in a running run."""
