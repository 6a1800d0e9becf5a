"""How signatures are read from source, and how a release's file is made of them."""

from __future__ import annotations

import ast
import json
import textwrap

import make
import pytest
from signatures import Module, Wanted, collect

SOURCES = {
    "lib": "from .base import Base\n",
    "lib.base": """
        class Base(Root, Generic[T]):
            name: str
            def __init__(self): self.rank = 0
            def run(self): ...
        class Root:
            def stop(self): ...
            def other(self): ...
    """,
    "lib.work.worker": """
        from .. import Base
        from ..tools import deco as decorator, run as imported
        import outside as far

        if True:
            @far.dataclass(frozen=True)
            class Worker(Base, far.Mixin):
                size: int = 3
                kind = "x"
                table: dict = far.field()
                _hidden: int = 1
                @decorator(1)
                async def start(self, a, /, b: int | None = None, *, c=2, **rest) -> None:
                    self.rank, self.place = 1, 2
                def steps(self):
                    yield 1
                def nested(self):
                    def inner():
                        yield 1
                    return lambda: (yield)
        try:
            def run(*names: str, key): ...
        except ImportError:
            pass
    """,
    "lib.tools": "def run(x): ...\ndef deco(f): ...\n",
}


def read(name: str) -> Module | None:
    source = SOURCES.get(name)
    return Module(name, textwrap.dedent(source), is_package=name == "lib") if source is not None else None


def facts(*modules: str, **wanted: set[str]) -> dict[str, object]:
    return collect(read, modules, Wanted(**{"names": set(), **wanted}))


def test_a_class() -> None:
    found = facts("lib.work.worker", names={"Worker", "Worker.*", "run"}, attributes={"place"})
    assert found["modules"]["lib.work.worker"] == {  # type: ignore[index]
        "functions": {"run": {"async": False, "parameters": ["*names: str", "key"]}},
        "classes": {
            "Worker": {
                "bases": ["lib.Base", "outside.Mixin"],
                "decorators": ["outside.dataclass"],
                "fields": {"kind": "", "size": "int = 3", "table": "dict"},
                "methods": {
                    "nested": {"async": False, "parameters": ["self"]},
                    "start": {
                        "async": True,
                        "parameters": ["self", "a", "/", "b: int | None = None", "*", "c=2", "**rest"],
                        "decorators": ["lib.tools.deco"],
                    },
                    "steps": {"async": False, "parameters": ["self"], "generator": True},
                },
                "attributes": ["place"],
            }
        },
    }


def test_what_a_hooks_class_inherits_is_kept_too() -> None:
    found = facts("lib.work.worker", "lib.gone", followed={"lib.work.worker.Worker"}, members={"stop", "rank"})
    modules = found["modules"]
    assert found["absent"] == ["lib.gone"]
    assert sorted(modules) == ["lib", "lib.base", "lib.work.worker"]  # type: ignore[call-overload]
    assert modules["lib"] == {"imports": {"Base": "lib.base.Base"}}  # type: ignore[index]
    classes = modules["lib.base"]["classes"]  # type: ignore[index]
    assert classes["Base"]["attributes"] == ["rank"]
    assert list(classes["Root"]["methods"]) == ["stop"]


def test_bases_of_which_nothing_is_kept_are_left_out() -> None:
    found = facts("lib.work.worker", names={"Worker.start"})
    assert list(found["modules"]) == ["lib.work.worker"]  # type: ignore[call-overload]


def test_names_that_a_module_only_imports() -> None:
    found = facts("lib.work.worker", followed={"lib.work.worker.imported"})
    assert found["modules"] == {
        "lib.tools": {"functions": {"run": {"async": False, "parameters": ["x"]}}},
        "lib.work.worker": {"imports": {"imported": "lib.tools.run"}},
    }


@pytest.mark.parametrize(
    "parameters",
    ["self", "a, b=1", "a, /", "a=1, /, b=2", "*, a", "*args, a=1", "a, *, b: int = 3, c, **d: str", "**d", ""],
)
def test_parameters_are_those_of_the_source(parameters: str) -> None:
    module = Module("m", f"def f({parameters}): ...", is_package=False)
    found = collect(lambda name: module, ["m"], Wanted(names={"f"}))
    said = ", ".join(found["modules"]["m"]["functions"]["f"]["parameters"])
    assert ast.dump(ast.parse(f"def f({said}): ...")) == ast.dump(ast.parse(f"def f({parameters}): ..."))


def test_a_file_reads_back_and_its_changes_are_named() -> None:
    before = facts("lib.work.worker", names={"Worker", "Worker.start", "run"})
    after = json.loads(make._pretty(before))
    assert after == before
    assert all(len(line) <= 140 for line in make._pretty(before).splitlines())
    worker = after["modules"]["lib.work.worker"]
    worker["classes"]["Worker"]["methods"]["begin"] = worker["classes"]["Worker"]["methods"].pop("start")
    worker["functions"]["run"]["parameters"] = ["key"]
    assert [line.split(":")[0] for line in make._changes(before, after)] == [
        "+ lib.work.worker.Worker.begin",
        "- lib.work.worker.Worker.start",
        "~ lib.work.worker.run",
    ]
