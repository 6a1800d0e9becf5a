"""Behaviours of hooks, a package for each kind of target."""
