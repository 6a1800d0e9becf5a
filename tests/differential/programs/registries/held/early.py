from held.rewards import length
