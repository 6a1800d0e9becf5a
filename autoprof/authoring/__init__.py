"""For who writes recipes: which there are, what is wrong with one, and the schema that editors use."""
