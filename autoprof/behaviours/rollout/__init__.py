"""Rollout engines and replicas that a trainer drives."""
