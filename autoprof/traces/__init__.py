"""Readers and mergers of traces. They stream, so memory does not grow with a trace's size."""
