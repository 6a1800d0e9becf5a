"""Behaviours for Ray: sessions, actors, and the collection of files at the end of a run."""
