"""Basic parts that do not depend on profiling: safe files, log, redaction, units, identity. Standard library only."""
