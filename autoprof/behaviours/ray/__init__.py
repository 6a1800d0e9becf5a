"""Ray: sessions, actors, collecting at the end."""
