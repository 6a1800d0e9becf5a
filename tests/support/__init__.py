"""Shared helpers, stand-ins and generators of test data."""
