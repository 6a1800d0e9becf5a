"""Tolerant decoder of the run directory's records: keeps what is readable in a file and names what is not.

A file may be damaged, of another autoprof, or of somebody else. So every field is decoded by itself: one of the wrong
type is left out, and the others stay. Fields that no struct has are kept as they are.
"""

from __future__ import annotations

import errno
import functools
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from autoprof.base import files, interrupts
from autoprof.base.originals import json, os
from autoprof.base.redact import writable
from autoprof.rundir.records import Line

# No file that autoprof writes for itself is larger, or has more objects in one another.
_MOST_BYTES = 64 << 20
_DEEPEST = 16
# So much is named of one file.
_MOST_NAMED = 5
# What stands in a field that is not there: the first of these that it can hold.
_BLANKS: tuple[Any, ...] = (None, "", 0, [], {})

T = TypeVar("T", bound=Struct)


def read(path: Path, kind: type[T], left_out: list[str] | None = None) -> T:
    """Read a file; what is missing in it, or not readable, is blank. Raises nothing.

    Args:
        path: The file.
        kind: Its struct.
        left_out: Is told what is left out, and why.
    """
    return record(fields(path, kind, left_out), kind)


def record(content: Mapping[str, Any], kind: type[T]) -> T:
    """Return fields as a struct; those that are missing, or of another type, are blank."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        interrupts.pass_on(error)
    return msgspec.convert({**_blanks(kind), **_kept(dict(content), kind, "", [])}, kind)


def fields(path: str | Path, kind: type[Struct], left_out: list[str] | None = None) -> dict[str, Any]:
    """Read the fields of a file, with those that its struct does not have; none where there is no file. Raises nothing.

    Args:
        path: The file.
        kind: Its struct.
        left_out: Is told what is left out, and why.
    """
    named: list[str] = []
    content: Any = {}
    try:
        read = _read(path)
        if (sound := _sound(read, kind)) is not None:
            return sound
        content = _writable(json.loads(read), _DEEPEST)
        if not isinstance(content, dict):
            named.append("it is no object")
    except FileNotFoundError as error:
        interrupts.pass_on(error)
        pass
    except OSError as error:
        interrupts.pass_on(error)
        named.append(f"it can't be read: {error.strerror or error}")
    except (ValueError, RecursionError, RuntimeError) as error:  # RuntimeError: links that lead to one another
        interrupts.pass_on(error)
        named.append(f"it can't be read: {str(error)[:100]}")
    kept: dict[str, Any] = _kept(content, kind, "", named) if isinstance(content, dict) else {}
    if left_out is not None and named:
        more = [f"and {len(named) - _MOST_NAMED} more"] if len(named) > _MOST_NAMED else []
        left_out.append(writable(f"{os.path.basename(path)}: {'; '.join([*named[:_MOST_NAMED], *more])}"))
    return kept


def _read(path: str | Path) -> bytes:
    try:
        return files.read(path, _MOST_BYTES)
    except OSError as error:
        interrupts.pass_on(error)
        if error.errno != errno.ELOOP:  # it is no link
            raise
    return files.read(os.path.realpath(path, strict=True), _MOST_BYTES)


def _sound(content: bytes, kind: type[Struct]) -> dict[str, Any] | None:
    """Return the fields of a file in which nothing is damaged, or None where somebody has to look more closely.

    A run may have thousands of files, and nearly all of them are as autoprof wrote them.
    """
    if content.count(b"{") + content.count(b"[") > _DEEPEST:
        return None
    try:
        fields: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
        msgspec.convert(fields, kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        interrupts.pass_on(error)
        return None
    return fields


_decode_line = msgspec.json.Decoder(Line).decode


def line(content: bytes) -> Line:
    """Decode a line of a timeline. A process's line has its kind alone.

    Raises:
        msgspec.DecodeError: It is none.
        UnicodeDecodeError: It is no UTF-8.
        RecursionError: It has lists in lists without end.
    """
    try:
        return _decode_line(content)
    except msgspec.ValidationError:
        return msgspec.convert({**_blanks(Line), **msgspec.json.decode(content, type=dict[str, Any])}, Line)


_hints = functools.lru_cache(typing.get_type_hints)


@functools.cache
def _blanks(kind: type[Struct]) -> dict[str, Any]:
    return {field.encode_name: _blank(field.type) for field in msgspec.structs.fields(kind) if field.required}


def _blank(kind: Any) -> Any:
    for blank in _BLANKS:
        try:
            msgspec.convert(blank, kind)
        except msgspec.ValidationError:
            continue
        return blank
    raise TypeError(f"{kind} has no blank")


def _kept(value: Any, kind: Any, where: str, named: list[str]) -> Any:
    """Return the value as far as it is of this kind; `msgspec.UNSET` where nothing of it is."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(value, dict) and origin is types.UnionType:  # one that may be missing
        kind = next((each for each in arguments if isinstance(each, type) and issubclass(each, Struct)), kind)
    inner: Any = None
    if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, Struct):
        known = _hints(kind, include_extras=True)
        inner = {name: (each, known.get(name, Any)) for name, each in value.items()}
    elif isinstance(value, dict) and origin is dict:
        inner = {name: (each, arguments[1]) for name, each in value.items()}
    if inner is not None:
        found = {name: _kept(each, of, f"{where}.{name}".strip("."), named) for name, (each, of) in inner.items()}
        return {name: each for name, each in found.items() if each is not msgspec.UNSET}
    if isinstance(value, list) and origin is list:
        entries = [_kept(each, arguments[0], f"{where}[{place}]", named) for place, each in enumerate(value)]
        return [each for each in entries if each is not msgspec.UNSET]
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        named.append(f"{where[:80]} is left out ({str(error)[:80]})")
        return msgspec.UNSET


def _writable(content: Any, deepest: int) -> Any:
    """Return what JSON and terminals take: texts without lone surrogates, numbers that are some, and no depth without
    end."""
    if isinstance(content, str):
        return writable(content)
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    if isinstance(content, (dict, list)) and not deepest:
        raise ValueError(f"it has more than {_DEEPEST} lists or objects in one another")
    if isinstance(content, dict):
        return {writable(name): _writable(value, deepest - 1) for name, value in content.items()}
    return [_writable(value, deepest - 1) for value in content] if isinstance(content, list) else content
