"""Ray: sessions, actors, and the collection at a run's end."""
