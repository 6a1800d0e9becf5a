"""Recording of one window in this process."""
