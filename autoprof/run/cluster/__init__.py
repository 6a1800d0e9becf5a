"""A run's use of Ray's control plane."""
