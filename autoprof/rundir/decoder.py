"""Tolerant decoder of the run directory's records: it keeps the valid fields of a file and reports the invalid fields.

A file may be damaged, or written by another release or another program. So each field is decoded separately: a field of
the wrong type is left out, and all other fields are kept. Fields that the struct does not define are kept unchanged.
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

from autoprof.base import files, seam
from autoprof.base.originals import json, os
from autoprof.base.redact import writable
from autoprof.rundir.records import Line

# Maximum size in bytes and nesting depth of a file. Every file that autoprof writes is smaller and less deeply nested.
_MAX_BYTES = 64 << 20
_MAX_DEPTH = 16
# Maximum number of problems that are reported per file.
_MAX_PROBLEMS = 5
# Blank values for missing fields. A field gets the first of these values that the type of the field accepts.
_BLANKS: tuple[Any, ...] = (None, "", 0, [], {})

T = TypeVar("T", bound=Struct)


def read(path: Path, kind: type[T], left_out: list[str] | None = None) -> T:
    """Read a JSON file as a struct. Missing and invalid fields get a blank value. Never raises.

    Args:
        path: The file.
        kind: The type of the struct.
        left_out: List to which one text with the reasons is added if fields were left out.
    """
    return record(fields(path, kind, left_out), kind)


def record(content: Mapping[str, Any], kind: type[T]) -> T:
    """Return fields as a struct. Missing fields and fields of the wrong type get a blank value."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError:
        return msgspec.convert({**_blanks(kind), **_kept(dict(content), kind, "", [])}, kind)


def fields(path: str | Path, kind: type[Struct], left_out: list[str] | None = None) -> dict[str, Any]:
    """Return the valid fields of a JSON file as a dict, including fields that the struct does not define. Never raises.

    Args:
        path: The file. If the file does not exist, the dict is empty.
        kind: The type of the struct.
        left_out: List to which one text with the reasons is added if fields were left out.
    """
    problems: list[str] = []
    content: Any = {}
    try:
        data = _read(path)
        if (undamaged := _undamaged(data, kind)) is not None:
            return undamaged
        content = _writable(json.loads(data), _MAX_DEPTH)
        if not isinstance(content, dict):
            problems.append("it is not a JSON object")
    except (OSError, ValueError, RecursionError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        seam.pass_on(error)
        if not isinstance(error, FileNotFoundError):
            problems.append(f"it can't be read: {getattr(error, 'strerror', None) or str(error)[:100]}")
    valid_fields: dict[str, Any] = _kept(content, kind, "", problems) if isinstance(content, dict) else {}
    if left_out is not None and problems:
        more_problems = [f"and {len(problems) - _MAX_PROBLEMS} more"] if len(problems) > _MAX_PROBLEMS else []
        left_out.append(writable(f"{os.path.basename(path)}: {'; '.join([*problems[:_MAX_PROBLEMS], *more_problems])}"))
    return valid_fields


def _read(path: str | Path) -> bytes:
    try:
        return files.read(path, _MAX_BYTES)
    except OSError as error:
        seam.pass_on(error)
        if error.errno != errno.ELOOP:  # the path is not a symbolic link
            raise
    return files.read(os.path.realpath(path, strict=True), _MAX_BYTES)


def _undamaged(content: bytes, kind: type[Struct]) -> dict[str, Any] | None:
    """Return the fields of a file if all fields are valid, or None if each field must be checked separately.

    This function is fast for a valid file. A run may have thousands of files, and nearly all of them are valid.
    """
    if content.count(b"{") + content.count(b"[") > _MAX_DEPTH:
        return None
    with seam.suppress(ValueError, RecursionError):
        fields: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
        msgspec.convert(fields, kind)
        return fields
    return None


_decode_line = msgspec.json.Decoder(Line).decode


def line(content: bytes) -> Line:
    """Decode the journal line of an ended span.

    For a line of another kind, only the fields that also belong to `Line` are set. All other fields are blank.

    Raises:
        msgspec.DecodeError: The line is not valid.
        UnicodeDecodeError: The line is not UTF-8.
        RecursionError: The line is nested too deeply.
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
    raise TypeError(f"no blank value fits the type {kind}")


def _kept(value: Any, kind: Any, where: str, problems: list[str]) -> Any:
    """Return the valid parts of a value, or `msgspec.UNSET` if the value has no valid part.

    Args:
        value: The value from JSON.
        kind: The type that the value should have.
        where: The path of the value in the file, for `problems`.
        problems: List to which a text is added for each invalid part.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(value, dict) and origin is types.UnionType:  # an optional struct
        kind = next((member for member in arguments if isinstance(member, type) and issubclass(member, Struct)), kind)
    typed_fields: Any = None
    if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, Struct):
        field_types = _hints(kind, include_extras=True)
        typed_fields = {name: (field, field_types.get(name, Any)) for name, field in value.items()}
    elif isinstance(value, dict) and origin is dict:
        typed_fields = {name: (entry, arguments[1]) for name, entry in value.items()}
    if typed_fields is not None:
        valid_fields = {
            name: _kept(field, field_type, f"{where}.{name}".strip("."), problems)
            for name, (field, field_type) in typed_fields.items()
        }
        return {name: field for name, field in valid_fields.items() if field is not msgspec.UNSET}
    if isinstance(value, list) and origin is list:
        entries = [_kept(entry, arguments[0], f"{where}[{index}]", problems) for index, entry in enumerate(value)]
        return [entry for entry in entries if entry is not msgspec.UNSET]
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problems.append(f"{where[:80]} is left out ({str(error)[:80]})")
        return msgspec.UNSET


def _writable(content: Any, depth: int) -> Any:
    """Return the content in a form that JSON and terminals accept.

    Lone surrogates are replaced. NaN and infinity become texts.

    Raises:
        ValueError: The content has more than `depth` nested lists or objects.
    """
    if isinstance(content, str):
        return writable(content)
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    if isinstance(content, (dict, list)) and not depth:
        raise ValueError(f"it has more than {_MAX_DEPTH} nested lists or objects")
    if isinstance(content, dict):
        return {writable(name): _writable(value, depth - 1) for name, value in content.items()}
    return [_writable(value, depth - 1) for value in content] if isinstance(content, list) else content
