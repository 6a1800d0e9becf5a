"""The command `autoprof doctor`."""
