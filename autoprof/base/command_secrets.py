"""Search for secrets in short options of known programs: `docker login -p x`, `mysql -px`, `curl -u user:x`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from autoprof.base.named_secrets import closing, compiled, value_at
from autoprof.base.secret_names import COOKIE, LOGIN, NONE, PASSWORD, RANDOM, is_option, is_secret

# Programs and the certainty that the value of an option is a secret. Names that end in `*` are beginnings of names.
# `login` is a command of docker, podman, helm, oc and others.
_OPTIONS = {
    "curl": {"-u": LOGIN, "-U": LOGIN, "--user": LOGIN, "--proxy-user": LOGIN, "-b": COOKIE},
    "login": {"-p": PASSWORD},
    "sshpass": {"-p": PASSWORD},
    "redis-cli": {"-a": PASSWORD},
    "mysql*": {"-p": PASSWORD},
    "mariadb*": {"-p": PASSWORD},
    "mongo*": {"-p": PASSWORD},
    "ldap*": {"-w": PASSWORD},
}
# In these programs, the word after `-p` is not the password.
_JOINED = ("mysql", "mariadb")
# This command takes a key without an option.
WANDB_LOGIN = "wandb login"
_NAMES = "|".join(name.replace("*", "[a-z_]*") for name in _OPTIONS)
# Words in texts of a shell, and in lists of JSON or Python: their quotes may be escaped.
_PROGRAM = rf"""(?<![\w.+-])({_NAMES})(?=[ \t]|\\{{0,3}}["'],)"""
_OPTION = r"""(?<=[\s"'])--?[^\s"',=\\-][^\s"',=\\]*"""
_WORD = r"""(?<=[\s"'])[^\s"',\\-][^\s"',\\]*"""
_SEPARATOR = r"""\\{0,3}["']?,?[ \t]+(?:\\\r?\n[ \t]*)?|\\{0,3}["'],|="""
_VALUE = r"""[^\s"']+"""
_BEFORE = 16  # Number of characters searched for the word before `login`.
_ENDS = ("\n", " | ", " && ", " || ")
# Options of curl without a value: they may precede another one, as in `-sSu`.
_CURL_FLAGS = frozenset("sSkLfgivIjJlnNOqRaB#0123456")


def program_of(argument: str, before: str = "") -> str:
    """Return the program that an argument names, or an empty text. `before` is the argument before it."""
    name = argument.rpartition("/")[2]
    if name == "login" and before.rpartition("/")[2] == "wandb":
        return WANDB_LOGIN
    return name if compiled(_NAMES).fullmatch(name) else ""


def short_option(program: str, argument: str) -> tuple[int, int]:
    """Return the certainty that an option's value is a secret, and the length of the option without its value."""
    if not program:
        return NONE, 0
    options = next((_OPTIONS[each] for each in _OPTIONS if compiled(each.replace("*", ".*")).fullmatch(program)), {})
    if argument in options:
        return options[argument], len(argument)
    if argument[:2] in options:
        return options[argument[:2]], 2
    last = f"-{argument[-1:]}"
    if program == "curl" and last in options and _CURL_FLAGS.issuperset(argument[1:-1]):
        return options[last], len(argument)
    return NONE, 0


def takes_next(program: str) -> bool:
    """Return True if the argument after an option of this program is its value."""
    return not program.startswith(_JOINED)


def places(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each secret, in order. The search takes linear time."""
    found = compiled(_PROGRAM).search(text)
    while found is not None:
        following = compiled(_PROGRAM).search(text, found.end())
        stop = _end_of_command(text, found.end(), following.start() if following else len(text))
        if found[1] == "login" and text[max(0, found.start() - _BEFORE) : found.start()].rstrip(" \t\"',\\").endswith(
            "wandb"
        ):
            yield from _words(text, found.end(), stop)
        else:
            yield from _values(text, found, stop)
        found = following


def _end_of_command(text: str, start: int, stop: int) -> int:
    for end in _ENDS:
        at = text.find(end, start, stop)
        while at > 0 and text[at - 1] == "\\":
            at = text.find(end, at + 1, stop)
        stop = at if at >= 0 else stop
    return stop


def _words(text: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
    for word in compiled(_WORD).finditer(text, start, stop):
        if is_secret(RANDOM, word[0]):
            yield word.span()


def _values(text: str, program: re.Match[str], stop: int) -> Iterator[tuple[int, int]]:
    """Yield the places of the values of a program's options."""
    end = program.end()
    for option in compiled(_OPTION).finditer(text, program.end(), stop):
        certainty, length = short_option(program[1], option[0])
        if certainty == NONE or option.start() < end:
            continue
        start, close = _value(text, option, length, program[1])
        if is_secret(certainty, text[start:close]):
            yield start, close
            end = close


def _value(text: str, option: re.Match[str], length: int, program: str) -> tuple[int, int]:
    """Return the place of an option's value, which is in the same word or in the next one."""
    at, quote = option.start() + length, text[option.start() - 1]
    if length == len(option[0]) and (separator := compiled(_SEPARATOR).match(text, at)):
        value = value_at(text, separator.end(), _VALUE)
        ours = separator[0] == "=" or (takes_next(program) and not is_option(value.text))
        return (value.start, value.end) if ours else (at, at)
    if quote in ("'", '"'):
        close = closing(text, quote, at)
        return at, close if close >= 0 else len(text)
    value = value_at(text, at, _VALUE)
    return value.start, value.end
