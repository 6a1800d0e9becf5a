#: differs: sys._getframe(1) in a hooked function is the wrapper's frame
"""A hooked function that looks at its caller's frame, as verl's auto_await does (recipes say `rewrap` for it)."""

import sys

from tinyrl import Trainer


def look():
    return sys._getframe(2).f_code.co_name


def caller():
    return Trainer().update(look)


print(caller())
