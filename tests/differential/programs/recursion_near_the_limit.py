#: differs: a wrapped call takes two frames more of the recursion limit
"""Recursion through a hooked function almost to the limit, which a program chose for what it needs."""

import sys

from tinyrl import evaluate


def down(depth):
    return evaluate(down, depth - 1) if depth else "bottom"


sys.setrecursionlimit(500)
print(down(200))
