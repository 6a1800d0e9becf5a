import sys

import circle.a

SEEN = hasattr(sys.modules["circle.a"], "Trainer")


def late():
    return circle.a.Trainer().fit(1)
