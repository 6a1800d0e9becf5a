"""Engines' HTTP servers and their clients."""
