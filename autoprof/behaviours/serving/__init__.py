"""Engines behind HTTP servers, and the trainers that call these servers."""
