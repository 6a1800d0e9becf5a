"""Preparation of structs that several threads decode."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


def complete(kind: type[T]) -> type[T]:
    """Decorator that makes msgspec build its description of a struct now, while one thread imports the module.

    Otherwise msgspec builds the description when the struct is first decoded. If the struct contains another struct or
    a literal, this runs Python code, so a second thread may decode the struct at the same time. The second thread then
    uses a half-built description, which crashes the process (msgspec 0.22, `StructInfo_Convert`).
    """
    msgspec.json.Decoder(kind)
    return kind
