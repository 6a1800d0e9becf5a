"""Suggestions for misspelt names."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return `; did you mean X?` if a known name X is similar to `name` or contains it, else an empty text.

    Args:
        name: The wrong name.
        known: The correct names.
        prefix: Text to put before X. It is not compared.
    """
    # Only needed for errors.
    from difflib import get_close_matches

    names = list(known)
    longer = [candidate for candidate in names if len(name) > 2 and name in candidate]
    near = longer if len(longer) == 1 else get_close_matches(name, names, 1, 0.6)
    return f"; did you mean {prefix + near[0]!r}?" if near else ""
