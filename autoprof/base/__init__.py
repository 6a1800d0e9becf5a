"""Safe files, log, redaction, units and identity: knows nothing of profiling. Standard library only."""
