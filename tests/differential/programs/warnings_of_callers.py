#: differs: stacklevel counts the wrapper's frames, so the warning names a line of autoprof
"""Warning of a hooked function that names the line of its caller."""

import warnings

from tinyrl import Trainer


class Mine(Trainer):
    pass


def old(*args):
    warnings.warn("update(inside) is deprecated", DeprecationWarning, stacklevel=3)


Trainer().update(old)
Trainer().update(old)
