"""Programs that rows start, each in a process of its own, as a user would write them."""
