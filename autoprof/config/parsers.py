"""Parsers of single values of settings, from an environment variable or from TOML.

Each parser raises a ValueError for a wrong value. The message of the ValueError is the reason, or is empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from autoprof.base import files, seam
from autoprof.base.originals import os


def text(value: object) -> str:
    """Return text without the whitespace around it."""
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("")
    return value.strip()


# Maximum length of a name and of a path in a file system, in bytes (NAME_MAX, PATH_MAX).
MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4000


def folder(value: object) -> str:
    """Return the path of a folder, which need not exist."""
    path = os.fsencode(text(value))
    if len(path) > _MAX_PATH_BYTES or any(len(name) > MAX_NAME_BYTES for name in path.split(os.sep.encode())):
        raise ValueError("it is too long")
    return os.fsdecode(path)


def switch_or(taken: Callable[[str], bool]) -> Callable[[object], str]:
    """Return a parser for a switch (on or off), or for text that `taken` accepts.

    The parser returns an empty text for off, and `1` for on.
    """

    def parse(value: object) -> str:
        if isinstance(value, (bool, int)):
            value = str(int(value))
        word = text(value)
        if word.lower() in ("", "0", "false", "off", "no"):
            return ""
        if word.lower() in ("1", "true", "on", "yes"):
            return "1"
        if not taken(word):
            raise ValueError("")
        return word

    return parse


def words(value: object) -> tuple[str, ...]:
    """Return the words of a list, or of a text in which commas separate the words."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, (list, tuple)) or not all(isinstance(word, str) for word in value):
        raise ValueError("")
    result = tuple(word.strip() for word in value)
    if not result or not all(result):
        raise ValueError("a name is empty")
    return result


def one_of(choices: tuple[str, ...]) -> Callable[[object], str]:
    """Return a parser for one of the words in `choices`. Upper and lower case are equal."""

    def parse(value: object) -> str:
        word = text(value).lower()
        if word not in choices:
            raise ValueError("")
        return word

    return parse


def several_of(choices: tuple[str, ...]) -> Callable[[object], tuple[str, ...]]:
    """Return a parser for one or more of the words in `choices`. Case is ignored, and repeated words are dropped."""

    def parse(value: object) -> tuple[str, ...]:
        chosen_words = tuple(word.lower().replace("_", "-") for word in words(value))
        for word in chosen_words:
            if word not in choices:
                raise ValueError(f"{word!r} is unknown")
        return tuple(dict.fromkeys(chosen_words))

    return parse


def grammar(parse: Callable[[str], object]) -> Callable[[object], str]:
    """Return a parser for text that `parse` accepts. The parser converts whole numbers and lists to text first."""

    def check(value: object) -> str:
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, list):
            value = ",".join(str(item) for item in value)
        written = text(value)
        parse(written)
        return written

    return check


def positive(value: object) -> float:
    """Return a number above 0 and below 1e12. `value` may be a number or a text."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError("")
    try:
        number = float(value)
    except (ValueError, OverflowError) as error:
        seam.pass_on(error)
        raise ValueError("") from None
    if number >= 1e12:
        raise ValueError("it must be below 1000000000000")
    if not number > 0:
        raise ValueError("")
    if isinstance(value, str) and not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{0,9})?", value):
        raise ValueError("write it in digits, such as 1024 or 0.5")
    return number


def count(value: object) -> int:
    """Return a whole number above 0."""
    number = positive(value)
    if number != int(number):
        raise ValueError("it must be a whole number")
    return int(number)


def paths(value: object) -> tuple[str, ...]:
    """Return the absolute paths of the files and folders in a text or a list. All of them must exist."""
    if isinstance(value, str):
        value = [part for part in re.split(f"[,{os.pathsep}]", value) if part.strip()]
    result = tuple(os.path.abspath(os.path.expanduser(path)) for path in words(value))
    for path in result:
        if not files.exists(path):
            raise ValueError(f"there is no {path}")
    return result
