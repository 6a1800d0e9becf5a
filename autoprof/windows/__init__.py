"""Steps and ranks to capture: settings, triggers, conditions, stragglers."""
