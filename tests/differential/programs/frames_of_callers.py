#: differs: in a hooked function, sys._getframe(1) is the wrapper's frame
"""Hooked function that reads its caller's frame, as verl's auto_await does (recipes use `rewrap` for it)."""

import sys

from tinyrl import Trainer


def look():
    return sys._getframe(2).f_code.co_name


def caller():
    return Trainer().update(look)


print(caller())
