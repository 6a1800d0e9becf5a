"""`autoprof stacks`: where each process of a run stands now."""
