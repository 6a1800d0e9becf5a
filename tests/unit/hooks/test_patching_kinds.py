"""Kinds of functions in a target's modules: some are wrapped and work as before, the others are not changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import Python, processes_of
from tests.support.recipe_texts import recipe

TOY = """
import abc, asyncio, contextlib, enum, functools, operator, types

class Other:
    def bound(self, value): return (type(self).__name__, value)
    def __call__(self, value): return value
    @property
    def extra(self): return 1

class Binding(Other):
    def __get__(self, instance, owner=None): return functools.partial(self, instance) if instance else self

class Kinds(Other):
    def method(self, value): return (type(self).__name__, value)
    async def amethod(self, value): return (type(self).__name__, value)
    @classmethod
    def clsmethod(cls, value): return (cls.__name__, value)
    @classmethod
    async def aclsmethod(cls, value): return (cls.__name__, value)
    @staticmethod
    def static(value): return value
    @staticmethod
    async def astatic(value): return value
    @abc.abstractmethod
    def abstract(self, value): return value
    @contextlib.contextmanager
    def manager(self, value): yield value
    @contextlib.asynccontextmanager
    async def amanager(self, value): yield value
    def __call__(self, value): return value
    builtin = abs
    slot = object.__repr__
    borrowed = Other().bound
    partial = functools.partial(operator.add, 1)
    lambda_ = lambda self, value: value

    generator_ran = False
    def generator(self, value): yield value
    async def agenerator(self, value): yield value
    @classmethod
    def clsgenerator(cls, value): yield value
    @staticmethod
    async def stagenerator(value): yield value
    @types.coroutine
    def old(self, value): yield value
    @property
    def prop(self): return 3
    @functools.cached_property
    def cached(self): return 4
    part = functools.partialmethod(method, 5)
    @functools.singledispatchmethod
    def single(self, value): return value
    @functools.lru_cache
    def lru(self, value): return value
    callable_ = Other()
    descriptor = Binding()
    number = 7
    class Nested: pass

@functools.lru_cache
def cached_function(value): return value
instance = Other()
Class = Kinds.Nested
def generator(value): yield value
async def agenerator(value): yield value
@functools.singledispatch
def dispatched(value): return value
@dispatched.register
def _(value: str): return value.upper()
def made(value): return value
made.mark = object()
async def amade(value): return value
partial = functools.partial(made)
builtin = len

# In a table they would be replaced.
ORIGINAL = (*globals().items(), *((f"Kinds.{name}", value) for name, value in vars(Kinds).items()))
"""
WRAPPED = {
    "Kinds.method": "[k.method(1), Kinds.method(k, value=2)]",
    "Kinds.amethod": "[run(k.amethod(1)), run(Kinds.amethod(k, value=2))]",
    "Kinds.clsmethod": "[k.clsmethod(1), Kinds.clsmethod(2), Child.clsmethod(3)]",
    "Kinds.aclsmethod": "[run(k.aclsmethod(1)), run(Child.aclsmethod(3))]",
    "Kinds.static": "[k.static(1), Kinds.static(2)]",
    "Kinds.astatic": "[run(k.astatic(1)), run(Kinds.astatic(2))]",
    "Kinds.abstract": "[Kinds.abstract.__isabstractmethod__, k.abstract(1)]",
    "Kinds.manager": "[enter(k.manager(1))]",
    "Kinds.amanager": "[run(aenter(k.amanager(1)))]",
    "Kinds.__call__": "[k(1), callable(k)]",
    "Kinds.bound": "[k.bound(1), Other().bound(2), Kinds.bound(k, 3)]",
    "Kinds.builtin": "[k.builtin(-1), Kinds.builtin(-2)]",
    "Kinds.slot": "[k.slot() == object.__repr__(k)]",
    "Kinds.borrowed": "[k.borrowed(1), Kinds.borrowed(2)]",
    "Kinds.partial": "[k.partial(1), Kinds.partial(2)]",
    "Kinds.lambda_": "[k.lambda_(1), Kinds.lambda_(k, 2)]",
    "dispatched": "[target.toy.dispatched(1), target.toy.dispatched('a'), len(target.toy.dispatched.registry)]",
    "made": "[target.toy.made(1), target.toy.made.mark is dict(target.toy.ORIGINAL)['made'].mark]",
    "amade": "[run(target.toy.amade(1)), inspect.iscoroutinefunction(target.toy.amade)]",
    "partial": "[target.toy.partial(1)]",
    "builtin": "[target.toy.builtin([1])]",
}
GENERATORS = ["Kinds.generator", "Kinds.agenerator", "Kinds.clsgenerator", "Kinds.stagenerator", "Kinds.old"]
OTHER_TYPES = {
    "Kinds.prop": "property",
    "Kinds.cached": "cached_property",
    "Kinds.part": "partialmethod",
    "Kinds.single": "singledispatchmethod",
    "Kinds.lru": "_lru_cache_wrapper",
    "Kinds.callable_": "Other",
    "Kinds.descriptor": "Binding",
    "Kinds.number": "int",
    "Kinds.Nested": "type",
    "Class": "type",
    "cached_function": "_lru_cache_wrapper",
    "instance": "Other",
}
REFUSED = dict.fromkeys(
    (*GENERATORS, "generator", "agenerator"), 'TypeError: it is a generator function; set around = "next"'
)
REFUSED |= {name: f"TypeError: it is a {kind}, not a function" for name, kind in OTHER_TYPES.items()}
CHECK = f"""
import asyncio, inspect, json
import target.toy
from target.toy import Kinds, Other
class Child(Kinds): pass
run, k = asyncio.run, Kinds()
def enter(manager):
    with manager as value: return value
async def aenter(manager):
    async with manager as value: return value
def now(path):
    return vars(Kinds).get(path.removeprefix("Kinds.")) if "." in path else vars(target.toy)[path]
same = [path for path in {[*WRAPPED, *REFUSED]!r} if now(path) is dict(target.toy.ORIGINAL).get(path)]
results = {{path: repr(eval(call)) for path, call in {WRAPPED!r}.items()}}
print(json.dumps([same, results]))
"""


@pytest.fixture
def check(tmp_path: Path, python: Python) -> Callable[..., tuple[list[str], dict[str, str]]]:
    """Import the toy. Return the names whose object is the same as before, and the result of each call."""
    package = tmp_path / "lib" / "target"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "toy.py").write_text(TOY)
    options = 'stage = "{}", role = "toy"'
    hooks = [(path, f"target.toy:{path}", "span", options.format(path.lower())) for path in [*WRAPPED, *REFUSED]]
    (tmp_path / "target.toml").write_text(recipe("target", *hooks))

    def go(**variables: str) -> tuple[list[str], dict[str, str]]:
        settings = {"AUTOPROF_RECIPES": str(tmp_path / "target.toml"), "PYTHONPATH": str(tmp_path / "lib")}
        return json.loads(python(CHECK, **settings, **variables).stdout)

    return go


def test_each_kind(check: Any, tmp_path: Path) -> None:
    same, results = check(AUTOPROF="1")
    _, expected = check()
    assert results == expected
    assert sorted(same) == sorted(REFUSED)
    (process,) = processes_of(tmp_path / "autoprof_runs" / "latest")
    states = {key.removeprefix("target/"): (hook["state"], hook["reason"]) for key, hook in process["hooks"].items()}
    assert {path: states[path] for path in WRAPPED} == dict.fromkeys(WRAPPED, ("applied", ""))
    assert {path: states[path] for path in REFUSED} == {path: ("failed", why) for path, why in REFUSED.items()}
    assert [path for path in WRAPPED if not process["hooks"][f"target/{path}"]["called"]] == []
    assert process["errors"] == {}
