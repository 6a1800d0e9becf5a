"""Keeps secrets out of what is written: arguments that are named like one lose their value."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_SECRET = re.compile(r"(token|secret|passw|credential|api[_-]?key|access[_-]?key|authorization|bearer)", re.IGNORECASE)


def redacted(command: Sequence[str]) -> str:
    """A command line as a shell takes it, with the values of arguments named like secrets left out."""
    shown: list[str] = []
    hide = False
    for argument in command:
        name, equals, _ = argument.partition("=")
        if hide:
            argument, hide = "***", False
        elif equals and _SECRET.search(name):
            argument = f"{name}=***"
        elif argument.startswith("-") and not equals and _SECRET.search(name):
            hide = True
        shown.append(argument)
    return shlex.join(shown)
