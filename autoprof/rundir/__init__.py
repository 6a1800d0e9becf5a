"""The run directory: file names, records, and reading them."""
