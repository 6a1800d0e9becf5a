"""Keeps secrets out of what is written: arguments that are named like one lose their value."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_NAME = re.compile(
    r"(token|secret|password|passwd|credentials?|authorization|(api|access|secret|private)[_-]?key)$", re.IGNORECASE
)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "***"


def redacted(command: Sequence[str]) -> str:
    """A command line as a shell takes it, with the values of arguments named like secrets left out."""
    shown: list[str] = []
    hide = False
    for argument in command:
        name, equals, _ = argument.partition("=")
        if hide:
            argument, hide = _HIDDEN, False
        elif equals and _NAME.search(name):
            argument = f"{name}={_HIDDEN}"
        elif argument.startswith("-") and not equals and _NAME.search(name):
            hide = True
        shown.append(_IN_URL.sub(_HIDDEN, argument))
    return shlex.join(shown)
