"""The JSON files of a run directory as typed documents: what is readable in one is kept, what is not is named.

A file may be damaged, of another autoprof, or of somebody else. So every field is decoded by itself: one of the wrong
type is left out, and the others stay. Fields that are not known here are kept as they are.
"""

from __future__ import annotations

import functools
import json
import math
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
from msgspec import Meta

from autoprof import _files, interrupts
from autoprof.redaction import writable

# No file that autoprof writes for itself is larger, or has more objects in one another.
_MOST_BYTES = 64 << 20
_DEEPEST = 16
# So much is named of one file.
_MOST_NAMED = 5

Whole = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
Size = Annotated[int, Meta(ge=0, le=1 << 62)]
# Seconds since the epoch up to the year 2116.
Moment = Annotated[float, Meta(ge=0, le=(1 << 62) / 1e9)]


class NodeEntry(TypedDict, total=False):
    id: str
    host: str
    directory: str


class RunSettings(TypedDict, total=False):
    steps: str
    recipes: list[str]
    tool: list[str]


class RunDocument(TypedDict, total=False):
    """`run.json`."""

    id: str
    command: str
    state: str
    host: str
    pid: Whole
    ticks: Whole
    started: Moment
    ended: Moment
    hosts: list[str]
    recipes: list[str]
    versions: dict[str, str]
    settings: RunSettings
    nodes: list[NodeEntry]
    earlier: list[dict[str, Any]]
    cut_off: str


class Moments(TypedDict, total=False):
    unix_ns: Whole
    monotonic_ns: Whole


class Clock(TypedDict, total=False):
    start: Moments
    stop: Moments


class MetaDocument(TypedDict, total=False):
    """`<capture>.meta.json`."""

    step: Whole
    role: str
    stage: str
    part: str
    rank: Whole | None
    replica: Whole | None
    host: str
    pid: Whole
    tool: str
    state: str
    reason: str
    window: str
    slowest: str
    bytes: Size
    clock: Clock
    steps: list[Whole]
    merged: list[str]
    left_out: list[str] | dict[str, str]
    device_events: bool
    device_reason: str
    asked_bytes: Size
    free_bytes: Size


class HookEntry(TypedDict, total=False):
    state: str
    reason: str
    called: Moment | None


class ErrorEntry(TypedDict, total=False):
    count: Size
    last: str


class ProcessDocument(TypedDict, total=False):
    """`hooks/<process>.json`."""

    host: str
    node: str
    pid: Whole
    process: str
    versions: dict[str, str]
    hooks: dict[str, HookEntry]
    errors: dict[str, ErrorEntry]


class Missing(TypedDict, total=False):
    host: str
    path: str
    reason: str


class CollectedDocument(TypedDict, total=False):
    """`collected.json`."""

    missing: list[Missing]


def read(path: Path, kind: Any, left_out: list[str] | None = None) -> dict[str, Any]:
    """Read a document; an empty one where there is none. Raises nothing.

    Args:
        path: The file.
        kind: A `TypedDict`.
        left_out: Is told what is left out, and why.
    """
    named: list[str] = []
    content: Any = {}
    try:
        content = _writable(json.loads(_files.read(path.resolve(), _MOST_BYTES)), _DEEPEST)
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
        left_out.append(writable(f"{path.name}: {'; '.join([*named[:_MOST_NAMED], *more])}"))
    return kept


_fields = functools.lru_cache(typing.get_type_hints)


def _kept(value: Any, kind: Any, where: str, named: list[str]) -> Any:
    """The value as far as it is of this kind; `msgspec.UNSET` where nothing of it is."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    inner: Any = None
    if isinstance(value, Mapping) and typing.is_typeddict(kind):
        known = _fields(kind, include_extras=True)
        inner = {name: (each, known.get(name, Any)) for name, each in value.items()}
    elif isinstance(value, Mapping) and origin is dict:
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
    """What JSON and terminals take: texts without lone surrogates, numbers that are some, and no depth without end."""
    if isinstance(content, str):
        return writable(content)
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    if isinstance(content, (dict, list)) and not deepest:
        raise ValueError(f"it has more than {_DEEPEST} lists or objects in one another")
    if isinstance(content, dict):
        return {writable(name): _writable(value, deepest - 1) for name, value in content.items()}
    return [_writable(value, deepest - 1) for value in content] if isinstance(content, list) else content
