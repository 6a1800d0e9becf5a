"""Structs that several threads may read."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


def complete(kind: type[T]) -> type[T]:
    """Decorator that makes msgspec build its description of a struct now, while one thread imports the module.

    Otherwise msgspec builds it when the struct is first decoded. If the struct contains another struct or a literal,
    that runs Python code. A second thread that decodes meanwhile uses a half-built description, which crashes the
    process (msgspec 0.22, `StructInfo_Convert`).
    """
    msgspec.json.Decoder(kind)
    return kind
