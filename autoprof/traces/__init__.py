"""Traces as streams: read in pieces, and merged, in little memory whatever their size."""
