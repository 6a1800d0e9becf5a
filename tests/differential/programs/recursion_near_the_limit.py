#: differs: a wrapped call uses two more frames of the recursion limit
"""Recursion through a hooked function up to a limit that the program chose for its own frames."""

import sys

from tinyrl import evaluate


def down(depth):
    return evaluate(down, depth - 1) if depth else "bottom"


sys.setrecursionlimit(500)
print(down(200))
