"""Programs that rows start, each in a separate process, written as a user would."""
