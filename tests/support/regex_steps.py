"""Matcher of regular expressions that counts comparisons. It works like Python's own, without shortcuts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

if sys.version_info >= (3, 11):
    from re import _parser as parser  # type: ignore[attr-defined]
else:
    import sre_parse as parser

_CATEGORIES = {
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_NOT_SPACE": lambda char: not char.isspace(),
    "CATEGORY_WORD": lambda char: char.isalnum() or char == "_",
    "CATEGORY_DIGIT": str.isdecimal,
}


class Counting:
    """Compiled pattern that counts comparisons.

    It supports the syntax that autoprof's redaction uses, and raises an error at any other syntax.

    Attributes:
        steps: Number of comparisons with a character or a position.
        searched: Number of characters searched.
    """

    def __init__(self, pattern: re.Pattern[str], count: bool = True) -> None:
        self.steps = self.searched = 0
        self._pattern = pattern
        self._count = count
        self._nodes = list(parser.parse(pattern.pattern, pattern.flags))
        self._folds = bool(pattern.flags & re.IGNORECASE)

    def sub(self, replacement: Any, text: str) -> str:
        self.searched += len(text)
        position = 0
        while self._count and position <= len(text):
            end = next(self._ends(self._nodes, text, position), None)
            position = position + 1 if end is None else max(end, position + 1)
        return self._pattern.sub(replacement, text)

    def search(self, text: str, position: int = 0) -> re.Match[str] | None:
        found = self._pattern.search(text, position)
        last = found.start() if found else len(text)
        self.searched += last - position
        while self._count and position <= last:
            next(self._ends(self._nodes, text, position), None)
            position += 1
        return found

    def match(self, text: str, position: int = 0) -> re.Match[str] | None:
        if self._count:
            next(self._ends(self._nodes, text, position), None)
        return self._pattern.match(text, position)

    def fullmatch(self, text: str) -> re.Match[str] | None:
        if self._count:
            any(end == len(text) for end in self._ends(self._nodes, text, 0))
        return self._pattern.fullmatch(text)

    def finditer(self, text: str, position: int, end: int) -> Iterator[re.Match[str]]:
        self.sub("", text[position:end])
        return self._pattern.finditer(text, position, end)

    def _ends(self, nodes: list[Any], text: str, at: int) -> Iterator[int]:
        """Yield the ends of the matches of these nodes that begin at `at`, in the order of the attempts."""
        if not nodes:
            yield at
            return
        (kind, value), rest = nodes[0], nodes[1:]
        name = str(kind)
        if name == "SUBPATTERN":
            yield from self._ends([*value[3], *rest], text, at)
        elif name == "BRANCH":
            for branch in value[1]:
                yield from self._ends([*branch, *rest], text, at)
        elif name == "MAX_REPEAT":
            yield from self._repeated(value, rest, text, at)
        elif name == "MIN_REPEAT":
            yield from self._repeated_least(value, rest, text, at)
        elif name in ("ASSERT", "ASSERT_NOT", "AT"):
            if self._holds(name, value, text, at):
                yield from self._ends(rest, text, at)
        elif self._is(name, value, text, at):
            yield from self._ends(rest, text, at + 1)

    def _repeated(self, value: Any, rest: list[Any], text: str, at: int) -> Iterator[int]:
        least, most, inner = value
        if len(inner) == 1 and str(inner[0][0]) in ("IN", "LITERAL", "NOT_LITERAL", "ANY"):
            furthest = at
            while furthest - at < int(most) and self._is(str(inner[0][0]), inner[0][1], text, furthest):
                furthest += 1
            for end in range(furthest, at + least - 1, -1):
                yield from self._ends(rest, text, end)
            return
        if least == int(most):
            yield from self._ends([*list(inner) * least, *rest], text, at)
            return
        assert (least, int(most)) == (0, 1), "only single characters are repeated"
        yield from self._ends([*inner, *rest], text, at)
        yield from self._ends(rest, text, at)

    def _repeated_least(self, value: Any, rest: list[Any], text: str, at: int) -> Iterator[int]:
        least, most, inner = value
        assert (least, len(inner)) == (0, 1), "only single characters are repeated"
        yield from self._ends(rest, text, at)
        for end in range(at + 1, min(len(text), at + int(most)) + 1):
            if not self._is(str(inner[0][0]), inner[0][1], text, end - 1):
                return
            yield from self._ends(rest, text, end)

    def _holds(self, name: str, value: Any, text: str, at: int) -> bool:
        self.steps += 1
        if name == "AT":
            if str(value) == "AT_BOUNDARY":
                around = [_CATEGORIES["CATEGORY_WORD"](text[i]) for i in (at - 1, at) if 0 <= i < len(text)]
                return sum(around) == 1
            assert str(value) in ("AT_END", "AT_END_STRING"), value
            return at == len(text)
        direction, inner = value
        start = at if direction > 0 else at - len(inner)
        found = start >= 0 and next(self._ends(list(inner), text, start), None) is not None
        return found != (name == "ASSERT_NOT")

    def _is(self, name: str, value: Any, text: str, at: int) -> bool:
        self.steps += 1
        if at >= len(text):
            return False
        chars = {text[at], text[at].lower(), text[at].upper()} if self._folds else {text[at]}
        return any(self._one(name, value, char) for char in chars)

    def _one(self, name: str, value: Any, char: str) -> bool:
        if name == "LITERAL":
            return ord(char) == value
        if name == "ANY":
            return True
        if name == "NOT_LITERAL":
            return ord(char) != value
        if name == "RANGE":
            return bool(value[0] <= ord(char) <= value[1])
        if name == "CATEGORY":
            return _CATEGORIES[str(value)](char)
        assert name == "IN", name
        kinds = [(str(kind), inner) for kind, inner in value]
        negated = kinds[0][0] == "NEGATE"
        return negated != any(self._one(kind, inner, char) for kind, inner in kinds[negated:])
