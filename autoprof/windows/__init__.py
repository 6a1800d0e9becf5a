"""Choice of the steps and ranks to capture, by settings, triggers, conditions and stragglers."""
