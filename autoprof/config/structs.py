"""Structs that several threads may read."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


def complete(kind: type[T]) -> type[T]:
    """Have msgspec describe a struct now, while one thread imports its module. A decorator.

    Otherwise msgspec does so when the struct is first read. If the struct holds another one, or a literal, that runs
    Python code, and a second thread that reads meanwhile finds half a description, which crashes the process (msgspec
    0.22, `StructInfo_Convert`).
    """
    msgspec.json.Decoder(kind)
    return kind
