"""Wrapped functions pickle as before: by reference if they can be imported, otherwise by value."""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from autoprof.hooks import patching

SOURCE = """
class Holder:
    def method(self, value): return [type(self).__name__, value]
    async def amethod(self, value): return [type(self).__name__, value]
    @classmethod
    def clsmethod(cls, value): return [cls.__name__, value]
    @classmethod
    async def aclsmethod(cls, value): return [cls.__name__, value]
    @staticmethod
    def static(value): return value
    @staticmethod
    async def astatic(value): return value
def function(value): return value
async def afunction(value): return value
class Child(Holder): pass
"""
NAMES = ["method", "amethod", "clsmethod", "aclsmethod", "static", "astatic"]
PATHS = [*(f"Holder.{name}" for name in NAMES), "function", "afunction"]


def made(name: str) -> ModuleType:
    """Return a module with all functions wrapped, as after a target's import."""
    module = ModuleType(name)
    exec(SOURCE, module.__dict__)
    behaviour = SimpleNamespace(supply=lambda *args: False, install=lambda *args: False)
    for path in PATHS:
        hook: Any = SimpleNamespace(
            key=path, behaviour=behaviour, hook=SimpleNamespace(rewrap="", around="call", attribute=path)
        )
        patching._patch(hook, module, path)
    return module


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the same module, but importable."""
    module = made("toy_target")
    monkeypatch.setitem(sys.modules, "toy_target", module)
    return module


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_by_reference(toy: ModuleType, pickler: Any) -> None:
    holder = toy.Holder()
    for found in (toy.function, toy.afunction, toy.Holder.method, toy.Holder.amethod, toy.Holder.static, toy.Holder):
        pickled = pickler.dumps(found)
        assert pickle.loads(pickled) is found
        assert len(pickled) < 100
    for name in NAMES:
        bound = getattr(holder, name)
        again = pickle.loads(pickler.dumps(bound))
        if pickler is pickle or "cls" not in name:  # cloudpickle ships the function of any class method by value
            assert getattr(again, "__func__", again) is getattr(bound, "__func__", bound)


def results(module: Any) -> list[Any]:
    """Return what each of the functions returns, called on an instance of the class and of its child."""

    def result(function: Callable[[int], Any]) -> Any:
        value = function(7)
        return [inspect.iscoroutinefunction(function), asyncio.run(value) if inspect.iscoroutine(value) else value]

    owners = (module.Holder(), module.Child(), module)
    names = (*NAMES, "function", "afunction")
    return [result(getattr(owner, name)) for owner in owners for name in names if hasattr(owner, name)]


ELSEWHERE = """{source}
import asyncio, inspect, json, sys, types
sys.modules["autoprof"] = None
import cloudpickle
print(json.dumps(results(types.SimpleNamespace(**cloudpickle.loads(bytes.fromhex(sys.stdin.read()))))))
"""


def test_by_value_where_autoprof_can_not_be_imported() -> None:
    module = made("__main__")
    expected: Any = SimpleNamespace()
    exec(SOURCE, expected.__dict__)
    shipped = {name: getattr(module, name) for name in ("Holder", "Child", "function", "afunction")}
    source = f"from __future__ import annotations\nNAMES = {NAMES!r}\n{inspect.getsource(results)}"
    command = [sys.executable, "-c", ELSEWHERE.format(source=source)]
    run = subprocess.run(command, input=cloudpickle.dumps(shipped).hex(), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == results(expected) == results(module)
