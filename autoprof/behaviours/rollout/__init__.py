"""Engines and replicas, as trainers hold them."""
