"""Settings of a run, their grammars, and options of tools."""
