"""Engines and replicas of trainers."""
