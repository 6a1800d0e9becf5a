"""Recording one window in this process."""
