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
    """Return True if this call must fail."""
    return os.environ.get("TORCH_NPU_STAND_IN_FAULT") == where


def constants(module: str, name: str) -> type:
    """Return a class of constants; the value of each is its name."""
    return type(name, (), {field: field for field in _MODULES[module]["classes"][name]["fields"]})


def signature(module: str, name: str) -> inspect.Signature:
    """Return the stored signature of a function or method; defaults are None, annotations are texts."""
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
    """Decorate a function that takes keywords so that it takes the parameters of the stored function."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        found = signature(module, name)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            return function(**found.bind(*args, **kwargs).arguments)

        checked.__signature__ = found  # type: ignore[attr-defined]
        return checked

    return decorate


def swallows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Print exceptions and return None instead, as torch_npu's public calls do."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            print(f"Call {function.__name__} failed. Exception: {error}")
            return None

    return called
