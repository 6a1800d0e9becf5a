"""Search for secrets that come after a name, such as `token=...`, in texts of any kind.

Texts are messages, JSON, YAML, reprs, command lines, headers and URLs, also nested in each other. The search takes
linear time, because it skips each secret that it finds and reads at most a few hundred characters of other values.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from autoprof.base.secret_names import (
    MAYBE,
    NONE,
    PAIR,
    RANDOM,
    SURE,
    has_words_of_tokenizers,
    is_name,
    is_option,
    is_secret,
    kind,
)

HIDDEN = "***"

# A name, and the separator before its value: `=`, `:`, a comma after a quote, or a space (options, sentences).
_NAMED = (
    r"""(?<![\w.+-])(?P<name>[\w.+-]+)(?![\w.+-])(?:[ ](?:provided|supplied|given|specified|used|value|is|was))?"""
    r"""(?P<close>[\\"'`)\]]{0,12})"""
    r"""(?:[ \t]*(?P<is>:=|=>|==?|:|>|%3[Dd])[ \t]*(?:\r?\n[ \t]+)?|(?P<comma>[ \t]*,\s*)|(?P<gap>\s+))"""
)
# The part between name and value in `name: HF_TOKEN, value: x`.
_PAIRED = r"""["']?[Vv]alue["']?[ \t]*[:=][ \t]*"""
_PAIR_OPENS = r"""[\[(]\s?[bru]{0,2}\\{0,8}["']\Z"""
_NOT_A_VALUE = r"""["']?[=:]"""
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
# A shell's script in quotes: an assignment in it ends at the next space.
_SCRIPT = r"""(?:(?<![\w-])-[a-z]{0,4}c["']?,?[ \t]+|\bCommand )["']{1,2}\Z"""
_RUNS_SCRIPT = r"-[a-z]{0,4}c"
_VARIABLE = r"[A-Za-z_]\w*"
_TO_NEXT_OPTION = r"[^\r\n]*?(?=[ \t]--?[A-Za-z]|[\r\n]|\Z)"
# Quotes inside single quotes, as `shlex.quote` and people write them, and the end of `it's`.
_QUOTES_INSIDE = ("'\"'\"'", "'\\''")
_CONTRACTED = r"'(?:s|t|d|m|re|ve|ll)(?![\w'\"=:,)\]}])"
_BEFORE = 24  # Number of characters searched for the word before a name.
_NEAR = 60  # Number of characters searched for words of tokenizers.
_FIELD = 400  # Number of characters searched for the field of a validation error.


class Value(NamedTuple):
    """A value in a text.

    Attributes:
        start: Index of the value's first character, after the opening quote.
        end: Index after the value's last character, before the closing quote.
        stop: Index after the closing quote.
        text: The characters of the value.
        quoted: True if the value is in quotes.
        closed: False if the closing quote is missing, because the text was cut.
    """

    start: int
    end: int
    stop: int
    text: str
    quoted: bool = False
    closed: bool = True


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression at its first use: most processes need only a few of the expressions."""
    return re.compile(pattern)


def is_script(name: str, before: str) -> bool:
    """Return True if an argument `name=...` is a shell script. `before` is the previous argument, such as `-c`."""
    return bool(compiled(_RUNS_SCRIPT).fullmatch(before) and compiled(_VARIABLE).fullmatch(name))


def places(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each secret in `text`, in order."""
    end = position = 0
    while (match := compiled(_NAMED).search(text, position)) is not None:
        position = match.end()
        for start, stop in _places_of(text, match, end):
            yield start, stop
            end = position = stop


def certainty_of(name: str, before: str = "") -> int:
    """Return the certainty that the value of an option or name is a secret. `before` is the word before the name."""
    if name in ("-u", "--user", "--proxy-user"):
        return PAIR
    if name == "login":
        return RANDOM
    return kind(name, "" if name.startswith("-") else before.lower())


def _places_of(text: str, match: re.Match[str], hidden_to: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each secret after one name. Secrets before index `hidden_to` were found before."""
    name, start, position = match["name"], match.start(), match.end()
    if text[start - 1 : start] == "\\" and name[0] in "nrt":
        name = name[1:]  # an escaped end of a line
    is_header = match[0].lower().startswith("header value")  # in errors of HTTP libraries
    certainty = SURE if is_header else certainty_of(name, _word_before(text[max(hidden_to, start - _BEFORE) : start]))
    if field := _of_field(text, match):
        yield from _secrets(text, position, match, field)
        return
    if certainty == NONE:
        return
    if paired := None if match["is"] else compiled(_PAIRED).match(text, position):
        position = paired.end()
    else:
        certainty = _weighed(text, match, certainty)
    if certainty != NONE:
        yield from _secrets(text, position, match, certainty)


def _of_field(text: str, match: re.Match[str]) -> int:
    """Return the certainty that the value in a validation error is a secret.

    These errors name the field in another place than directly before the value.
    """
    name, start, position = match["name"], match.start(), match.end()
    field = ""
    if name == "input_value" and match["is"]:  # pydantic: on the last line without an indent
        lines = text[max(0, start - _FIELD) : start].replace("\\n", "\n").split("\n")[start > _FIELD : -1]
        field = next((line for line in reversed(lines) if line[:1] not in ("", " ")), "")
    elif name == "input" and match["close"] and match["is"]:  # pydantic: its list of errors
        _, separator, location = text[max(0, start - _FIELD) : start].rpartition("loc")
        field = location.partition("msg")[0] if separator else ""
    elif name == "Value" and match["gap"]:
        return _of_omegaconf(text, value_at(text, position, _BARE))
    return kind(field) if field else NONE


def _of_omegaconf(text: str, value: Value) -> int:
    """Return the certainty that the value in an error of OmegaConf is a secret.

    The error begins with `Value 'x' of type 'str'` and names the field at its end.
    """
    if not value.quoted or not (text.startswith(" of type ", value.stop) or not value.closed):
        return NONE
    _, separator, field = text[value.stop : value.stop + _FIELD].partition("full_key: ")
    return kind(field.partition("\n")[0]) if separator else SURE  # the field was cut off


def _word_before(text: str) -> str:
    """Return the last word of a text that ends with a space; an empty text if no space follows the last word."""
    return text[:-1].rpartition(" ")[2].strip("\"'`(") if text.endswith(" ") else ""


def _weighed(text: str, match: re.Match[str], certainty: int) -> int:
    """Return the certainty that a secret follows a name. `certainty` comes from the name without its context."""
    previous_character = text[match.start() - 1 : match.start()]
    if match["comma"]:
        return _in_list(text, match, certainty)
    if match["gap"]:
        return _after_space(text, match, certainty)
    if match["is"] == ">":
        return certainty if previous_character == "<" else NONE
    if match["is"] == ":" and previous_character == "/":  # a path and a message about it
        return NONE
    return min(certainty, MAYBE) if match["is"] == "==" else certainty


def _in_list(text: str, match: re.Match[str], certainty: int) -> int:
    """Return the certainty that the list element after an option, or after the name in a pair, is a secret."""
    start, position = match.start(), match.end()
    if match["close"][-1:] not in ("'", '"') or not compiled(_QUOTE).match(text, position):
        return NONE
    if match["name"].startswith("-"):
        return _after_option(text, position, certainty)
    stop = value_at(text, position, _BARE).stop
    ends = text[stop : stop + 2].lstrip()[:1] in ("", ")", "]")
    is_pair = ends and compiled(_PAIR_OPENS).search(text[max(0, start - 12) : start])
    return certainty if is_pair else min(certainty, MAYBE)


def _after_space(text: str, match: re.Match[str], certainty: int) -> int:
    """Return the certainty that the word after a name is a secret. The name is an option, or a word of a sentence."""
    name, position = match["name"], match.end()
    if name.startswith("-"):
        return _after_option(text, position, certainty)
    quoted = compiled(_QUOTE).match(text, position) is not None
    if name.lower() == "header":
        return SURE if quoted else RANDOM
    return MAYBE if quoted and certainty >= SURE and name.lower() != "token" else RANDOM


def _after_option(text: str, position: int, certainty: int) -> int:
    """Return the certainty that the word after an option is a secret, and not the next option or an operator."""
    dashed = text[position : position + 2].lstrip("\"'").startswith("-")
    no_value = compiled(_NOT_A_VALUE).match(text, position) or (
        dashed and is_option(value_at(text, position, _BARE).text)
    )
    return NONE if no_value else certainty


def _secrets(text: str, position: int, match: re.Match[str], certainty: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each secret in the value that begins at `position`."""
    if brackets := compiled(_IN_BRACKETS).match(text, position):
        yield from _in_brackets(text, brackets, certainty)
        return
    position = _after_scheme(text, position, match["name"], certainty)
    bare = _XML if match["is"] == ">" else _LINE if _is_cookie(text, position, match["name"]) else _BARE
    value = value_at(text, position, bare)
    if text[value.stop : value.stop + 1] in ("(", "[") and is_name(value.text):  # a call: `SecretStr('x')`
        certainty = min(certainty, MAYBE)
        if not compiled(_QUOTE).match(text, value.stop + 1):
            return
        value = value_at(text, value.stop + 1, bare)
    if match["name"].lower() == "token" and _is_of_tokenizer(text, position, value.end):
        certainty = min(certainty, RANDOM)
    end = _end(text, match, value)
    if value.text == HIDDEN or _is_secret(text, match, value, end, certainty):
        yield from _parts(text, match, value, end)


def _is_of_tokenizer(text: str, start: int, end: int) -> bool:
    """Return True if the words around a `token` show that it is a token of a tokenizer, not a credential."""
    return has_words_of_tokenizers(f"{text[max(0, start - _NEAR) : start]} {text[end : end + _NEAR]}")


def _is_secret(text: str, match: re.Match[str], value: Value, end: int, certainty: int) -> bool:
    """Return True if a value is a secret, alone or together with the text up to `end`, or if the value was cut off."""
    is_sentence = certainty <= MAYBE and " " in value.text
    if not value.closed and certainty != RANDOM and not is_sentence:
        return True
    all_words_are_secret = (
        match["is"] == "=" and match["name"].startswith("-") and is_secret(certainty, text[value.start : end])
    )
    return all_words_are_secret or is_secret(certainty, value.text)


def _parts(text: str, match: re.Match[str], value: Value, end: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each secret after one name, without quotes: there may be several, as in `x,y`."""
    yield value.start, end
    position = max(end, value.stop)
    if value.quoted and (tail := compiled(_TAIL).match(text, position)):  # for a shell, this is a part of the same word
        yield tail.span()
        position = tail.end()
    yield from _more_secrets(text, position, match["name"].startswith("-"))


def _after_scheme(text: str, position: int, name: str, certainty: int) -> int:
    """Return the position of the secret `x` in `Authorization: Bearer x`; without `Bearer`, return `position`."""
    scheme = _ANY_SCHEME if name.lower().endswith("authorization") else _SCHEME
    match = compiled(scheme).match(text, position) if certainty >= SURE else None
    return match.end() if match else position


def _is_cookie(text: str, position: int, name: str) -> bool:
    return name.lower().endswith("cookie") and text[position - 2 : position] == ": "


def value_at(text: str, at: int, bare: str) -> Value:
    """Return the value that begins at index `at`. `bare` is the regular expression for values without quotes."""
    quote = compiled(_QUOTE).match(text, at)
    if quote is None:
        end = _end_of_word(text, at, bare)
        return Value(at, end, end, text[at:end])
    start = quote.end()
    close = closing(text, quote[1], start)
    end = close if close >= 0 else len(text)
    return Value(start, end, end + len(quote[1]), text[start:end], quoted=True, closed=close >= 0)


def _end_of_word(text: str, position: int, bare: str) -> int:
    """Return the end of a value without quotes. A value may contain apostrophes; punctuation at its end is excluded."""
    match = compiled(bare).match(text, position)
    end = match.end() if match else position
    while end > position and text[end : end + 1] == "'" and text[end - 1].isalnum():
        tail = compiled(_TAIL).match(text, end + 1)
        if tail is None:
            break
        end = tail.end()
    return position + len(text[position:end].rstrip(".:!?"))


def closing(text: str, quote: str, at: int) -> int:
    """Return the index of the quote that closes a value, or -1. Escaped quotes and apostrophes do not close a value."""
    close = text.find(quote, at)
    while close >= 0 and (length := _inside(text, quote, close)):
        close = text.find(quote, close + length)
    return close


def _inside(text: str, quote: str, position: int) -> int:
    """Return the length of the quote at `position` if the quote belongs to the value, or 0 if it closes the value."""
    if quote == "'":
        for inside in _QUOTES_INSIDE:
            if text.startswith(inside, position):
                return len(inside)
        if text[position - 1].isalpha() and compiled(_CONTRACTED).match(text, position):
            return 1
    return int(text[position - 1] == "\\" and quote[0] != "\\")


def _end(text: str, match: re.Match[str], value: Value) -> int:
    """Return the end of a secret.

    In `'--password=two words'`, the secret ends at the quote that matches the quote before the name. In
    `bash -c 'HF_TOKEN=x python'`, it ends at the space. In `--password=it's x`, it ends at the next option, because
    this is not the syntax of a shell.
    """
    start = match.start()
    previous_character = text[start - 1 : start]
    if value.quoted or not match["is"] or match["close"]:
        return value.end
    if previous_character not in ("'", '"'):
        unquoted = match["is"] == "=" and match["name"].startswith("-") and "'" in value.text
        rest = compiled(_TO_NEXT_OPTION).match(text, value.end) if unquoted else None
        return rest.end() if rest else value.end
    if compiled(_VARIABLE).fullmatch(match["name"]) and compiled(_SCRIPT).search(text[max(0, start - 16) : start]):
        return value.end
    close = closing(text, previous_character, value.end)
    return close if close >= 0 else len(text)


def _in_brackets(text: str, brackets: re.Match[str], certainty: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each secret in a list, a tuple or a mapping."""
    for element in compiled(_ELEMENT).finditer(text, brackets.start() + 1, brackets.end()):
        if text[element.end() : element.end() + 1] == ":" or element[0].endswith(":"):
            continue
        quoted = "double" if element["double"] else "single" if element["single"] else 0
        element_certainty = certainty if quoted or brackets[0][0] != "(" else min(certainty, MAYBE)
        if is_secret(element_certainty, element[quoted]):
            yield element.span(quoted)


def _more_secrets(text: str, position: int, option: bool) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of other secrets after the same name: `y` in `x,y`, or in `x y` after an option."""
    while (between := compiled(_NEXT).match(text, position)) and (option or between[0] == ","):
        bare = compiled(_BARE).match(text, between.end())
        if bare is None or not _is_another_secret(bare[0], between[0]):
            return
        yield bare.span()
        position = bare.end()


def _is_another_secret(value: str, between: str) -> bool:
    if value == HIDDEN:
        return True
    return compiled(_ASSIGNED).match(value) is None and is_secret(MAYBE if between == "," else RANDOM, value)
