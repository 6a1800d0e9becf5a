"""The run directory: the names of its files, the structs of its records, and the functions that read them."""
