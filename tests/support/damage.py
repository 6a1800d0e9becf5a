"""Generator of damaged and foreign replacements for any file of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

VALUES: list[Any] = [
    *(None, True, -1, 10**30, 1e308, float("nan"), float("-inf"), "", "a\udcff", "\x1b[31m", [], {}, [None], ["x"]),
    *({"x": {"y": [1, {"z": 2}]}}, [{}, 5], {"": None}),
]
TEXTS: dict[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(256)),
    "no json": b"{,}",
    "cut off": b'{"a": {"b": "c',
    "a list": b"[1, 2]",
    "a number": b"5",
    "null": b"null",
    "a text": b'"x"',
    "BOM": b"\xef\xbb\xbf{}",
    "utf-16": "{}".encode("utf-16"),
    "twice the same key": b'{"state": "ended", "state": 5, "hooks": {}, "hooks": []}',
    "deep": b'{"hooks": ' + b"[" * 300 + b"]" * 300 + b"}",
    "deeper": b"[" * 100_000,
    "digits": b'{"pid": ' + b"9" * 5000 + b"}",
    "surrogates": b'{"\\ud800": "\\udfff", "host": "\\ud800"}',
}


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


PLACES: dict[str, Callable[[Path], object]] = {
    "folder": os.mkdir,
    "pipe": os.mkfifo,
    "loop of links": _loop,
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "unreadable": lambda path: path.symlink_to("/proc/self/mem"),
}


def anything() -> st.SearchStrategy[Any]:
    """Return a strategy for any JSON value, with NaN and infinities, which Python's parser accepts too."""
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(VALUES)
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    )


def places(content: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a document, as a tuple of keys and indexes."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield (*at, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*at, key))


def changed(content: Any, at: tuple[Any, ...], *value: Any) -> Any:
    """Return a copy of the document with another value at `at`, or without it if no value is given."""
    copy = json.loads(json.dumps(content))
    inner = copy
    for key in at[:-1]:
        inner = inner[key]
    if value:
        inner[at[-1]] = value[0]
    else:
        del inner[at[-1]]
    return copy


def damages(path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each way to damage the file: a name, and a function that replaces the file."""
    before = path.read_bytes()

    def put(content: bytes) -> None:
        _remove(path)
        path.write_bytes(content)

    for name, text in TEXTS.items():
        yield name, lambda text=text: put(text)  # type: ignore[misc]
    for name, make in PLACES.items():
        yield name, lambda make=make: (_remove(path), make(path))  # type: ignore[misc]
    if path.suffix == ".gz":
        yield "half", lambda: put(before[: len(before) // 2])
        return
    content = json.loads(before.splitlines()[-1] if path.suffix == ".jsonl" else before)
    for at in places(content):
        yield f"without {at}", lambda at=at: put(_line(changed(content, at)))  # type: ignore[misc]
        for value in VALUES:
            made = _line(changed(content, at, value))
            yield f"{at} = {str(value)[:20]!a}", lambda made=made: put(made)  # type: ignore[misc]


def _line(content: Any) -> bytes:
    """Return a document as one line, like those of a timeline."""
    return json.dumps(content, separators=(",", ":")).encode()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    elif os.path.lexists(path):
        path.unlink()
