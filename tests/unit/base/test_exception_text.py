"""Texts of exceptions are made without calling the program's code."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import PurePosixPath
from typing import Any, NoReturn

import pytest

from autoprof.base.seam import described, reason, text


class Value:
    """Argument of an exception, of a class of the program."""

    def __repr__(self) -> NoReturn:
        raise AssertionError("the program's code was called")


class Shown(Exception):
    def __str__(self) -> NoReturn:
        raise AssertionError("the program's code was called")

    __repr__ = __str__


class Plain(Exception):
    pass


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    after: int


class ByObject(Exception):
    __str__ = object.__str__  # which calls `__repr__`

    def __repr__(self) -> NoReturn:
        raise AssertionError("the program's code was called")


class Named(type):
    @property
    def __name__(cls) -> NoReturn:  # type: ignore[override]
        raise AssertionError("the program's code was called")


class Metaclass(Exception, metaclass=Named):
    pass


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no score"), "no score"),
        (ValueError(), ""),
        (ValueError("shape", (2, 3), {"rank": 1}), "('shape', (2, 3), {'rank': 1})"),
        (KeyError("score"), "'score'"),
        (OSError(2, "No such file", PurePosixPath("a")), "[Errno 2] No such file: PurePosixPath('a')"),
        (UnicodeDecodeError("utf8", b"\xff", 0, 1, "bad"), "'utf8' codec can't decode byte 0xff in position 0: bad"),
        (json.JSONDecodeError("no value", "a", 0), "no value: line 1 column 1 (char 0)"),
        (subprocess.CalledProcessError(3, ["ls"]), "Command '['ls']' returned non-zero exit status 3."),
        (Plain("no score"), "no score"),
        (Plain(int), "<class 'int'>"),
        (Frozen(5), "5"),
        (RuntimeError(Plain("inner")), "inner"),
        (RuntimeError(Shown("inner")), "Shown(inner)"),
        (Shown(), ""),
        (Shown(503), "503"),
        (Shown("refused", 503), "('refused', 503)"),
        (ByObject("refused"), "refused"),
        (Metaclass("refused"), "refused"),
        (ValueError(Value()), "<Value>"),
        (KeyError(Value()), "<Value>"),
        (ValueError("bad", Value()), "('bad', <Value>)"),
        (ValueError([Value()]), "<list>"),
        (ValueError({"a": Value()}), "<dict>"),
        (ValueError(ITSELF), "<list>"),
    ],
)
def test_the_text_is_that_of_python_or_of_the_arguments(error: BaseException, expected: str) -> None:
    assert text(error) == expected


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no groups")
def test_a_group_counts_its_exceptions() -> None:
    group = ExceptionGroup("both failed", [Shown(), ValueError(Value())])  # noqa: F821
    assert text(group) == "both failed (2 sub-exceptions)"


def test_the_type_stands_before_the_text() -> None:
    assert described(Shown(503)) == "Shown: 503"
    assert described(Metaclass("refused")) == "Metaclass: refused"


def test_the_type_stands_for_an_empty_text() -> None:
    assert (described(MemoryError()), reason(MemoryError())) == ("MemoryError", "MemoryError")
    assert reason(ValueError("no room")) == "no room"


@pytest.mark.parametrize("raised", [SystemExit, RuntimeError])
def test_what_a_librarys_text_raises_stays_inside(raised: type[BaseException]) -> None:
    class Raises:
        def __repr__(self) -> NoReturn:
            raise raised

        __str__ = __repr__

    assert text(subprocess.CalledProcessError(3, Raises())) == ""  # type: ignore[arg-type]


class _Remote:
    """Path whose `__repr__` must not be called, since the program without autoprof does not call it."""

    def __fspath__(self) -> str:
        return "remote"

    def __repr__(self) -> str:
        raise KeyboardInterrupt


def _with_message(error: Any, message: object) -> BaseException:
    error.msg = message
    return error


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "no such object", _Remote()),
        FileNotFoundError(2, "no such object", "a", None, _Remote()),
        _with_message(SyntaxError("wrong"), _Remote()),
        _with_message(ImportError("missing"), _Remote()),
    ],
    ids=["filename", "second filename", "syntax", "import"],
)
def test_an_object_in_an_attribute_of_a_builtin_exception_is_not_asked(error: BaseException) -> None:
    assert text(error)


def test_an_errors_file_name_is_in_its_text() -> None:
    assert text(FileNotFoundError(2, "no such file", "a.txt")) == "[Errno 2] no such file: 'a.txt'"
