"""Keeps secrets and what terminals would obey out of what is written.

Secrets are known by the name of what holds them, by where they stand, or by their own look.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

_KEYS = "api|access|secret|private|wandb|auth|account|signing|encryption|ssh|license"
_NAMES = rf"token|secret|password|passwd|passphrase|credentials?|authorization|cookie|({_KEYS})[_-]?key"
_NAME = re.compile(rf"({_NAMES})$", re.IGNORECASE)
# In a text: what is called so, and what follows `=` or `:`, in quotes or up to where a value ends. Of
# `Authorization: Bearer x` the second word is meant, too.
_VALUE = r"""("[^"]*"|'[^']*'|[^\s,;&"'{}()\[\]]+)"""
_IN_TEXT = re.compile(
    rf"""(?P<name>[\w.+-]*({_NAMES})["']?(?P<is>\s*[=:]\s*))(?P<scheme>["']?(bearer|basic|token)\s+)?{_VALUE}""",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_URL = re.compile(r"[a-z][a-z0-9+.-]*(::[a-z][a-z0-9+.-]*)*://\S*", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer|basic)(\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
_LOOKS = re.compile(
    r"\b(hf_[A-Za-z0-9]{8,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|(AKIA|ASIA)[0-9A-Z]{16}|xox[abeprs]-[\w-]{10,}|AIza[\w-]{30,}|nvapi-[\w-]{16,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
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
        shown.append(hidden(argument))
    return shlex.join(shown)


def hidden(text: str) -> str:
    """A text of any kind, an error's for example, without the secrets in it."""
    text = _IN_URL.sub(_HIDDEN, text)
    text = _IN_TEXT.sub(lambda found: f"{found['name']}{found['scheme'] or ''}{_HIDDEN}", text)
    text = _BEARER.sub(rf"\1\2{_HIDDEN}", text)
    return _LOOKS.sub(_HIDDEN, text)


def hidden_in(content: Any) -> Any:
    """What is going to be JSON, without the secrets in its texts."""
    if isinstance(content, str):
        return hidden(content)
    if isinstance(content, dict):
        return {key: hidden_in(value) for key, value in content.items()}
    return [hidden_in(value) for value in content] if isinstance(content, (list, tuple)) else content


def is_url(text: str) -> bool:
    """Whether this looks like a URL, one of fsspec's that are chained among them (`simplecache::s3://...`)."""
    return _URL.fullmatch(text) is not None


def url(text: str) -> str:
    """A URL without what may be secret in it: a user, a password, a query."""
    return hidden(re.sub(r"(?<=://)[^/]*@", "", text.partition("?")[0]))


def plain(text: str) -> str:
    """A text for a terminal: what is no character to show, and what turns the direction of writing, is spelt out."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def writable(text: str) -> str:
    """A text that UTF-8 can hold: what a name of a file or a JSON's escape has else is spelt out."""
    return text.encode("utf-8", "backslashreplace").decode()
