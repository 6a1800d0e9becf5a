"""Guesses at names that were misspelt."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return `; did you mean X?` if X is near, or holds the name, else an empty text.

    Args:
        name: The name that is wrong.
        known: The names there are.
        prefix: Stands before each of them, and is not compared.
    """
    # Not before something is wrong.
    from difflib import get_close_matches

    there = list(known)
    inside = [each for each in there if len(name) > 2 and name in each]
    near = inside if len(inside) == 1 else get_close_matches(name, there, 1, 0.6)
    return f"; did you mean {prefix + near[0]!r}?" if near else ""
