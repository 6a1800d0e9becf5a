"""Tools for authors of recipes: list, check, first draft, trial, and the schema for editors."""
