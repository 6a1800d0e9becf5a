"""A trainer as people write them, of which the programs of the suite train with what they like inside."""

from tinyrl.trainer import Trainer, evaluate, score

__all__ = ["Trainer", "evaluate", "score"]
