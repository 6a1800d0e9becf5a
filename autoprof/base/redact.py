"""Redaction of secrets and of terminal control characters in autoprof's output.

A secret is recognized by its form or by the command option before it (`token_formats`), or by the name before it
(`named_secrets`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from autoprof.base import named_secrets, token_formats
from autoprof.base.named_secrets import HIDDEN, certainty_of, compiled, is_script
from autoprof.base.secret_names import NONE, RANDOM, SURE, is_name, is_option, is_secret, kind
from autoprof.base.token_formats import FORMATS

# JSON web tokens. A word that only begins like a token is matched, too, so that the search skips the whole word.
_JWT = r"\beyJ(?:[\w-]{8,}\.[\w-]{8,}\.[\w-]*(?P<whole>)|[\w-]*)"
_BEARER = r"(?i)\b(bearer|basic)([ \t]+)([\w.~+/=-]{8,})"
_ARGUMENT = r"[\w.+~/@-]+"
_URL = re.compile(r"[a-z][a-z0-9+.-]*(::[a-z][a-z0-9+.-]*)*://\S*", re.IGNORECASE)
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_BEHIND_URLS = " \t\n\r\v\f\"'<>"
_BETWEEN_WORDS = " \t\n\r,;&\"'{}()[]"
# Maximum number of characters searched and kept: an error may hold a whole tensor, a command a whole file.
_MAX_CHARS = 1 << 15
# Maximum number of additional searches of a text with a secret. If the quotes in a text are unbalanced, the search for
# one secret may miss another secret.
_MAX_REPEATS = 3


def redacted(command: Sequence[str]) -> str:
    """Return a command line without its secrets, quoted for a shell.

    Bytes of an argument that are not UTF-8 become escapes, because the files of a run contain only UTF-8.
    """
    words: list[str] = []
    certainty, program, previous_argument = NONE, "", ""
    room = _MAX_CHARS
    for i, argument in enumerate(command):
        if room <= 0:
            return writable(f"{shlex.join(words)} ... ({len(command) - i} more arguments)")
        part = argument[: room + 1]
        redacted_part, certainty = _without_secret(part, previous_argument, program, certainty)
        words.append(hidden(argument if redacted_part is part else redacted_part, room))
        program = token_formats.program_of(part, previous_argument) or program
        previous_argument = part
        room -= len(argument) + 1
    return writable(shlex.join(words))


def _without_secret(argument: str, previous_argument: str, program: str, certainty: int) -> tuple[str, int]:
    """Return an argument without its secret, and the certainty that the next argument is a secret.

    Args:
        argument: The argument.
        previous_argument: The argument before `argument`.
        program: The program that an earlier argument names, if short options of the program may have secrets.
        certainty: The certainty that this argument is a secret.
    """
    if program == token_formats.WANDB_LOGIN and not argument.startswith("-"):
        certainty = SURE
    if _is_value(argument, certainty):
        return HIDDEN, RANDOM
    short, length = token_formats.short_option(program, argument)
    if short != NONE and length < len(argument):
        return (f"{argument[:length]}{HIDDEN}" if is_secret(short, argument[length:]) else argument), NONE
    if short != NONE:
        return argument, short if token_formats.takes_next(program) else NONE
    name, equals, value = argument.partition("=")
    if equals and not is_script(name, previous_argument) and _holds_secret(name, value):
        return f"{name}={HIDDEN}", NONE
    return argument, NONE if equals else _announced(name, previous_argument)


def _is_value(argument: str, certainty: int) -> bool:
    """Return True if an argument is a secret. `certainty` comes from the previous argument, such as `--token`."""
    assigned = argument.partition("=")[2].strip("=") and certainty == RANDOM
    return not is_option(argument) and not assigned and _any_secret(certainty, argument)


def _holds_secret(name: str, value: str) -> bool:
    """Return True if the value of an argument `name=value` is a secret, or has a secret between commas."""
    named = compiled(_ARGUMENT).fullmatch(name) is not None
    return named and value[:1] not in ("[", "(", "{") and _any_secret(certainty_of(name), value)


def _any_secret(certainty: int, value: str) -> bool:
    return any(is_secret(certainty, part.strip("\"'")) for part in value.split(","))


def _announced(argument: str, previous_argument: str) -> int:
    """Return the certainty that the next argument of a command is a secret."""
    certainty = certainty_of(argument, previous_argument) if compiled(_ARGUMENT).fullmatch(argument) else NONE
    return certainty if argument.startswith("-") or certainty == NONE else RANDOM


def hidden(text: str, max_chars: int = _MAX_CHARS) -> str:
    """Return a text, such as an error message, without its secrets. Cut the text after `max_chars` characters."""
    beginning = text if len(text) <= max_chars else _cut(text[:max_chars])
    result, previous_result = _searched(beginning), beginning
    for _ in range(_MAX_REPEATS):
        if result == previous_result:
            break
        result, previous_result = _searched(result), result
    return result if beginning is text else f"{result}... ({len(text) - len(beginning)} more characters)"


def _searched(text: str) -> str:
    """Search a text once. Return the text without the secrets that the search finds."""
    for part, pattern in FORMATS.items():
        if part in text:
            text = compiled(pattern).sub(lambda match: f"{match[1] if match.lastindex else ''}{HIDDEN}", text)
    if "eyJ" in text:
        text = compiled(_JWT).sub(lambda match: match[0] if match["whole"] is None else HIDDEN, text)
    text = compiled(_BEARER).sub(_without_bearer, text)
    text = _without(token_formats.places(text), text)
    return _without(named_secrets.places(text), text)


def _without_bearer(match: re.Match[str]) -> str:
    return match[0] if is_name(match[3]) else f"{match[1]}{match[2]}{HIDDEN}"


def _without(places: Iterator[tuple[int, int]], text: str) -> str:
    pieces: list[str] = []
    end = 0
    for start, stop in places:
        pieces += text[end:start], HIDDEN
        end = stop
    return "".join([*pieces, text[end:]])


def _cut(text: str) -> str:
    """Return a text, which was cut, without its last word and without a URL at its end.

    They may be the beginning of a secret, which may not look like a secret without its end.
    """
    text = _without_last_word(text)
    url = text.find("://", max(map(text.rfind, _BEHIND_URLS)) + 1)
    return text if url < 0 else _without_last_word(text[:url])


def _without_last_word(text: str) -> str:
    end = len(text)
    # An apostrophe after a letter may belong to the word: `it's`.
    while end and (text[end - 1] not in _BETWEEN_WORDS or (text[end - 1] == "'" and text[end - 2 : end - 1].isalnum())):
        end -= 1
    return text[:end]


def hidden_in(content: Any) -> Any:
    """Return the content of a JSON file without its secrets."""
    if isinstance(content, str):
        return hidden(content)
    if isinstance(content, dict):
        return {key: _hidden_value(str(key), value) for key, value in content.items()}
    return [hidden_in(value) for value in content] if isinstance(content, (list, tuple)) else content


def _hidden_value(name: str, value: Any) -> Any:
    return HIDDEN if isinstance(value, str) and is_secret(kind(name), value) else hidden_in(value)


def is_url(text: str) -> bool:
    """Return True if a text looks like a URL, or like a chained URL of fsspec (`simplecache::s3://...`)."""
    return _URL.fullmatch(text) is not None


def url(text: str) -> str:
    """Return a URL without the parts that may be secret: user, password and query."""
    return hidden(re.sub(r"(?<=://)[^/]*@", "", text.partition("?")[0]))


def plain(text: str) -> str:
    """Return a text that is safe for a terminal: control characters and changes of writing direction are escaped."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def writable(text: str) -> str:
    """Return a text that can be encoded as UTF-8. Other characters, from file names or JSON, become escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
