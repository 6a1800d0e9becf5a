"""Command `autoprof stacks`: the current stacks of a run's processes."""
