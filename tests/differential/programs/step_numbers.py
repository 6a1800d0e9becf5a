"""Step numbers that are numbers of other types."""

import decimal
import fractions

from tinyrl import Trainer


class Number(int):
    def __index__(self):
        raise RuntimeError("not you")

    def __str__(self):
        raise RuntimeError("nor you")

    __repr__ = __hash__ = __int__ = __format__ = __str__


for number in (1, True, 2.0, "3", None, decimal.Decimal(4), fractions.Fraction(5), Number(6), -7, 2**70, [8], 1e400):
    trainer = Trainer()
    trainer.global_step = number
    print(trainer.train_step(lambda: "works"), trainer.seen)
