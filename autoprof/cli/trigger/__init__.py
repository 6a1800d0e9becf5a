"""The command `autoprof trigger`."""
