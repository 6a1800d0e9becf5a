"""Tools for authors of recipes: a list, a check, and the schema that editors use."""
