"""One run as its processes share it."""
