"""Search for secrets that follow their name, in texts of any kind.

Texts are messages, JSON, YAML, reprs, command lines, headers and URLs, also nested. The search takes linear time: it
skips each secret that it finds, and it reads at most a few hundred characters of any other value.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from autoprof.base.secret_names import MAYBE, NONE, PAIR, RANDOM, SURE, is_name, is_secret, kind

HIDDEN = "***"

# A name, and the separator before its value: `=`, `:`, a comma after a quote, or a space (options, sentences).
_NAMED = (
    r"""(?<![\w.+-])(?P<name>[\w.+-]+)(?![\w.+-])(?:[ ](?:provided|supplied|given|specified|used|value|is|was))?"""
    r"""(?P<close>[\\"'`)\]]{0,12})"""
    r"""(?:[ \t]*(?P<is>:=|=>|==?|:|>|%3[Dd])[ \t]*(?:\r?\n[ \t]+)?|(?P<comma>[ \t]*,\s*)|(?P<gap>\s+))"""
)
# Of `name: HF_TOKEN, value: x`.
_PAIRED = r"""["']?[Vv]alue["']?[ \t]*[:=][ \t]*"""
_PAIR_OPENS = r"""[\[(]\s?[bru]{0,2}\\{0,8}["']\Z"""
_NEXT_OPTION = r"""["']?[-=:]"""
_SCHEME = r"""(?i)["']?(?:bearer|basic)[ \t]+(?=[\w*])"""
_ANY_SCHEME = r"""["']?[A-Za-z][A-Za-z-]{2,20}[ \t]+(?=[\w*])"""
# A quote, which may be escaped, and a value without quotes.
_QUOTE = r"""[bBfFrRuU]{0,2}(\\{0,8}["'`])"""
_BARE = r"""\*{3}(?![\w*])|<[^<>\n]{0,80}>|[^\s,;&"'`{}()\[\]]+"""
_TAIL = r"""[\w*][^\s,;&"'`{}()\[\]]*"""
_LINE = r"""\w[^\r\n"'`]*"""  # of cookies
_XML = r"""[^\s,;&"'`{}()\[\]<]+"""
_IN_BRACKETS = r"[\[({][^\[\](){}]*"
_ELEMENT = r"""[bBuUrR]?(?:"(?P<double>[^"]*)(?:"|\Z)|'(?P<single>[^']*)(?:'|\Z))|[^\s,;&"']+"""
_NEXT = r",|\s+"
_ASSIGNED = r"[\w.+-]*[=:][^=]"
_BEFORE = 24  # Number of characters searched for the word before a name.


class Value(NamedTuple):
    """A value in a text.

    Attributes:
        start: Index of its first character, after the quote.
        end: Index after its last character, before the quote.
        stop: Index after its closing quote.
        text: Its characters.
        quoted: True if it is in quotes.
        closed: False if its closing quote is missing: texts get cut.
    """

    start: int
    end: int
    stop: int
    text: str
    quoted: bool = False
    closed: bool = True


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return a compiled expression. Most processes need only a few of them."""
    return re.compile(pattern)


def places(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each secret, in order."""
    end = position = 0
    while (found := compiled(_NAMED).search(text, position)) is not None:
        position = found.end()
        for start, stop in _places_of(text, found, end):
            yield start, stop
            end = position = stop


def certainty_of(name: str, before: str = "") -> int:
    """Return the certainty that the value of an option or a name is a secret. `before` is the word before it."""
    if name in ("-u", "--user", "--proxy-user"):
        return PAIR
    if name == "login":
        return RANDOM
    if name.startswith("-"):
        return SURE if (before, name) == ("sshpass", "-p") else kind(name)
    return kind(name, before.lower())


def _places_of(text: str, found: re.Match[str], hidden_to: int) -> Iterator[tuple[int, int]]:
    """Yield the places of the secrets of one name. The text up to `hidden_to` is already hidden."""
    name, start, at = found["name"], found.start(), found.end()
    if text[start - 1 : start] == "\\" and name[0] in "nrt":
        name = name[1:]  # an escaped end of a line
    certainty = certainty_of(name, _word_before(text[max(hidden_to, start - _BEFORE) : start]))
    if certainty == NONE:
        return
    if paired := None if found["is"] else compiled(_PAIRED).match(text, at):
        at = paired.end()
    else:
        certainty = _weighed(text, found, certainty)
    if certainty != NONE:
        yield from _secrets(text, at, found, certainty)


def _word_before(text: str) -> str:
    """Return the word at the end of a text, if a space follows it."""
    return text[:-1].rpartition(" ")[2].strip("\"'`(") if text.endswith(" ") else ""


def _weighed(text: str, found: re.Match[str], certainty: int) -> int:
    """Return the certainty that a secret follows, considering the characters around the name."""
    before = text[found.start() - 1 : found.start()]
    if found["comma"]:
        return _in_list(text, found, certainty)
    if found["gap"]:
        return _after_space(text, found, certainty)
    if found["is"] == ">":
        return certainty if before == "<" else NONE
    if found["is"] == ":" and before == "/":  # a path and a message about it
        return NONE
    return min(certainty, MAYBE) if found["is"] == "==" else certainty


def _in_list(text: str, found: re.Match[str], certainty: int) -> int:
    """Return the certainty for the next element of a list: the value of an option, or of a name in a pair."""
    start, at = found.start(), found.end()
    if found["close"][-1:] not in ("'", '"') or not compiled(_QUOTE).match(text, at):
        return NONE
    if found["name"].startswith("-"):
        return NONE if compiled(_NEXT_OPTION).match(text, at) else certainty
    stop = _value(text, at, _BARE).stop
    ends = text[stop : stop + 2].lstrip()[:1] in ("", ")", "]")
    is_pair = ends and compiled(_PAIR_OPENS).search(text[max(0, start - 12) : start])
    return certainty if is_pair else min(certainty, MAYBE)


def _after_space(text: str, found: re.Match[str], certainty: int) -> int:
    """Return the certainty for the word after a name, which is an option or part of a sentence."""
    name, at = found["name"], found.end()
    if name.startswith("-"):
        return NONE if compiled(_NEXT_OPTION).match(text, at) else certainty
    quoted = compiled(_QUOTE).match(text, at) is not None
    return MAYBE if quoted and certainty >= SURE and name.lower() != "token" else RANDOM


def _secrets(text: str, at: int, found: re.Match[str], certainty: int) -> Iterator[tuple[int, int]]:
    """Yield the places of the secrets that begin at `at`."""
    if brackets := compiled(_IN_BRACKETS).match(text, at):
        yield from _in_brackets(text, brackets, certainty)
        return
    at = _after_scheme(text, at, found["name"], certainty)
    bare = _XML if found["is"] == ">" else _LINE if _is_cookie(text, at, found["name"]) else _BARE
    value = _value(text, at, bare)
    if text[value.stop : value.stop + 1] in ("(", "[") and is_name(value.text):  # a call: `SecretStr('x')`
        certainty = min(certainty, MAYBE)
        if not compiled(_QUOTE).match(text, value.stop + 1):
            return
        value = _value(text, value.stop + 1, bare)
    sentence = certainty <= MAYBE and " " in value.text
    cut = not value.closed and certainty != RANDOM and not sentence
    if value.text == HIDDEN or is_secret(certainty, value.text) or cut:
        yield from _parts(text, found, value)


def _parts(text: str, found: re.Match[str], value: Value) -> Iterator[tuple[int, int]]:
    """Yield the places of a secret without its quotes, and of further secrets of its name."""
    end = _end(text, found, value)
    yield value.start, end
    at = max(end, value.stop)
    if value.quoted and (tail := compiled(_TAIL).match(text, at)):  # the same word for a shell
        yield tail.span()
        at = tail.end()
    yield from _more(text, at, found["name"].startswith("-"))


def _after_scheme(text: str, at: int, name: str, certainty: int) -> int:
    """Return the start of the secret in `Authorization: Bearer x`."""
    scheme = _ANY_SCHEME if name.lower().endswith("authorization") else _SCHEME
    found = compiled(scheme).match(text, at) if certainty >= SURE else None
    return found.end() if found else at


def _is_cookie(text: str, at: int, name: str) -> bool:
    return name.lower().endswith("cookie") and text[at - 2 : at] == ": "


def _value(text: str, at: int, bare: str) -> Value:
    """Return the value that begins at `at`."""
    quote = compiled(_QUOTE).match(text, at)
    if quote is None:
        found = compiled(bare).match(text, at)
        value = found[0].rstrip(".:!?") if found else ""  # the end of a sentence
        return Value(at, at + len(value), at + len(value), value)
    start = quote.end()
    close = text.find(quote[1], start)
    while close > 0 and text[close - 1] == "\\" and quote[1][0] != "\\":
        close = text.find(quote[1], close + 1)
    end = close if close >= 0 else len(text)
    return Value(start, end, end + len(quote[1]), text[start:end], quoted=True, closed=close >= 0)


def _end(text: str, found: re.Match[str], value: Value) -> int:
    """Return the end of a secret. In `'--password=two words'` the quote before the name ends it."""
    before = text[found.start() - 1 : found.start()]
    if value.quoted or not found["is"] or found["close"] or before not in ("'", '"'):
        return value.end
    close = text.find(before, value.end)
    return close if close >= 0 else len(text)


def _in_brackets(text: str, brackets: re.Match[str], certainty: int) -> Iterator[tuple[int, int]]:
    """Yield the places of the secrets in a list, a tuple or a mapping."""
    for element in compiled(_ELEMENT).finditer(text, brackets.start() + 1, brackets.end()):
        if text[element.end() : element.end() + 1] == ":" or element[0].endswith(":"):
            continue
        quoted = "double" if element["double"] else "single" if element["single"] else 0
        least = certainty if quoted or brackets[0][0] != "(" else min(certainty, MAYBE)
        if is_secret(least, element[quoted]):
            yield element.span(quoted)


def _more(text: str, at: int, option: bool) -> Iterator[tuple[int, int]]:
    """Yield the places of further secrets of one name: `x,y`, and `x y` of an option."""
    while (between := compiled(_NEXT).match(text, at)) and (option or between[0] == ","):
        bare = compiled(_BARE).match(text, between.end())
        if bare is None or not _is_further(bare[0], between[0]):
            return
        yield bare.span()
        at = bare.end()


def _is_further(value: str, between: str) -> bool:
    if value == HIDDEN:
        return True
    return compiled(_ASSIGNED).match(value) is None and is_secret(MAYBE if between == "," else RANDOM, value)
