"""Steps, stages and spans of trainers."""
