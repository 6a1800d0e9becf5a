"""Typical trainer, which the programs of the suite call with their own functions inside."""

from tinyrl.trainer import Trainer, evaluate, score

__all__ = ["Trainer", "evaluate", "score"]
