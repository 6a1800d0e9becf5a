"""Stored signatures of one release."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

VERSION = os.environ["TORCH_NPU_STAND_IN"]
_STORED = json.loads((Path(__file__).resolve().parents[3] / "contracts" / "torch_npu.json").read_bytes())
_MODULES: dict[str, Any] = {
    name: variant["facts"]
    for name, variants in _STORED["modules"].items()
    for variant in variants
    if VERSION in variant["releases"].split()
}


def fault(where: str) -> bool:
    """Return whether something is to go wrong there."""
    return os.environ.get("TORCH_NPU_STAND_IN_FAULT") == where


def constants(module: str, name: str) -> type:
    """A class of constants, each with its name for a value."""
    return type(name, (), {field: field for field in _MODULES[module]["classes"][name]["fields"]})


def signature(module: str, name: str) -> inspect.Signature:
    """The stored signature of a function or a method; each default is None, each annotation a text."""
    owner, _, method = name.rpartition(".")
    facts = _MODULES[module]
    stored = (facts["classes"][owner]["methods"][method] if owner else facts["functions"][name])["parameters"]
    bare = [text.partition("=")[0].partition(":")[0].strip() + ("=None" if "=" in text else "") for text in stored]
    scope: dict[str, Any] = {}
    exec(f"def function({', '.join(bare)}): ...", scope)
    parameters = inspect.signature(scope["function"]).parameters.values()
    heads = [text.partition("=")[0].partition(":") for text in stored]
    annotations = {name.strip(): kind.strip() for name, colon, kind in heads if colon}
    empty = inspect.Parameter.empty
    return inspect.Signature([each.replace(annotation=annotations.get(each.name, empty)) for each in parameters])


def as_released(module: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function that takes what the stored one takes, and is called by keywords."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        found = signature(module, name)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            return function(**found.bind(*args, **kwargs).arguments)

        checked.__signature__ = found  # type: ignore[attr-defined]
        return checked

    return decorate


def swallows(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch_npu's public calls print what goes wrong, and return nothing."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            print(f"Call {function.__name__} failed. Exception: {error}")
            return None

    return called
