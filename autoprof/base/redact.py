"""Redaction of secrets, and of characters that terminals would obey, in what autoprof writes.

Secrets are known by the name of what holds them, by where they stand, or by their own look.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

_KEYS = "api|access|secret|private|wandb|auth|account|signing|encryption|ssh|license"
# `PWD` is a folder.
_NAMES = (
    rf"token|secret|password|passwd|(?-i:pwd)|passphrase|credentials?|authorization|cookie|({_KEYS})[_-]?key"
    r"|(amz|goog)-signature"
)
_NAME = re.compile(rf"({_NAMES})$", re.IGNORECASE)
# In a text: what is called so, and what follows `=` or `:`, in quotes or up to where a value ends. Of
# `Authorization: Bearer x` the second word is meant, too. Quotes that are not closed may have been: texts get cut.
_VALUE = r"""("[^"]*("|\Z)|'[^']*('|\Z)|[^\s,;&"'{}()\[\]]+)"""
# None of these expressions goes over a character more than a few times, wherever it begins to match: what comes in
# front of a name is left out, and a word that looks like a JWT's beginning and is none is taken as a whole.
_IN_TEXT = re.compile(
    rf"""(?P<name>({_NAMES})["']?\s*[=:]\s*)(?P<scheme>["']?(bearer|basic|token)\s+)?{_VALUE}""", re.IGNORECASE
)
# As arguments of a command in a text, or in a list of words.
_ARGUMENT = re.compile(
    rf"""(?P<name>(?<![\w-])--?[\w-]{{0,60}}?({_NAMES})(["']?,)?\s+)(?!["']?[-=:]){_VALUE}""", re.IGNORECASE
)
_PEM = re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)", re.DOTALL)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_URL = re.compile(r"[a-z][a-z0-9+.-]*(::[a-z][a-z0-9+.-]*)*://\S*", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer|basic)(\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
_LOOKS = re.compile(
    r"\b(hf_[A-Za-z0-9]{8,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|(AKIA|ASIA)[0-9A-Z]{16}|xox[abeprs]-[\w-]{10,}|AIza[\w-]{30,}|nvapi-[\w-]{16,}"
    r"|npm_[A-Za-z0-9]{16,})"
)
_JWT = re.compile(r"\beyJ(?:[\w-]{8,}\.[\w-]{8,}\.[\w-]*(?P<whole>)|[\w-]*)")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_BETWEEN_WORDS = " \t\n\r,;&\"'{}()[]"
_HIDDEN = "***"
# Characters of a text that are searched and kept: an error may hold a whole tensor, a command the content of a file.
_MOST = 1 << 15


def redacted(command: Sequence[str]) -> str:
    """Return a command line as a shell takes it, without the values of arguments named like secrets."""
    shown: list[str] = []
    hide = False
    room = _MOST
    for place, argument in enumerate(command):
        if room <= 0:
            return f"{shlex.join(shown)} ... ({len(command) - place} more arguments)"
        name, equals, _ = argument[: room + 1].partition("=")
        length = len(argument)
        if hide:
            argument, hide = _HIDDEN, False
        elif equals and _NAME.search(name):
            argument = f"{name}={_HIDDEN}"
        elif argument.startswith("-") and not equals and _NAME.search(name):
            hide = True
        shown.append(hidden(argument, room))
        room -= length + 1
    return shlex.join(shown)


def hidden(text: str, most: int = _MOST) -> str:
    """Return a text, an error's for example, without the secrets in it, and cut at `most` characters."""
    kept = text if len(text) <= most else _cut(text[:most])
    shown = _IN_URL.sub(_HIDDEN, kept)
    shown = _IN_TEXT.sub(lambda found: f"{found['name']}{found['scheme'] or ''}{_HIDDEN}", shown)
    shown = _PEM.sub(_HIDDEN, _ARGUMENT.sub(lambda found: f"{found['name']}{_HIDDEN}", shown))
    shown = _BEARER.sub(rf"\1\2{_HIDDEN}", shown)
    shown = _JWT.sub(lambda found: _HIDDEN if found["whole"] is not None else found[0], shown)
    shown = _LOOKS.sub(_HIDDEN, shown)
    return shown if kept is text else f"{shown}... ({len(text) - len(kept)} more characters)"


def _cut(text: str) -> str:
    """Return a text without its last word, and without a URL's beginning: half a secret may not look like one."""
    text = text[: max(map(text.rfind, _BETWEEN_WORDS)) + 1]
    before, scheme, rest = text.rpartition("://")
    return before if scheme and not re.search(r"[/@\s]", rest) else text


def hidden_in(content: Any) -> Any:
    """Return what is going to be JSON, without the secrets in its texts."""
    if isinstance(content, str):
        return hidden(content)
    if isinstance(content, dict):
        return {key: hidden_in(value) for key, value in content.items()}
    return [hidden_in(value) for value in content] if isinstance(content, (list, tuple)) else content


def is_url(text: str) -> bool:
    """Return whether this looks like a URL, including chained ones of fsspec (`simplecache::s3://...`)."""
    return _URL.fullmatch(text) is not None


def url(text: str) -> str:
    """Return a URL without what may be secret in it: a user, a password, a query."""
    return hidden(re.sub(r"(?<=://)[^/]*@", "", text.partition("?")[0]))


def plain(text: str) -> str:
    """Return a text for a terminal: control characters, and those that turn the direction of writing, are spelt out."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def writable(text: str) -> str:
    """Return a text that UTF-8 can hold: other characters of file names and JSON escapes are spelt out."""
    return text.encode("utf-8", "backslashreplace").decode()
