"""Signatures are read from source, and stored once for all releases that share them."""

from __future__ import annotations

import ast
import json
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprof.cli.recipes_catalog import Module
from tests.contracts import make
from tests.contracts.signature_files import Store, pretty
from tests.contracts.signatures import Facts, Wanted, collect

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
                    self.__dict__["held"] = 3
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


def facts(*modules: str, **wanted: set[str]) -> dict[str, Facts | None]:
    return collect(read, modules, Wanted(**{"names": set(), **wanted}))


def test_the_facts_of_a_class_are_collected() -> None:
    found = facts("lib.work.worker", names={"Worker", "Worker.*", "run"}, attributes={"place", "held"})
    assert found["lib.work.worker"] == {
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
                "attributes": ["held", "place"],
            }
        },
    }


def test_inherited_members_of_a_hooks_class_are_kept() -> None:
    found = facts("lib.work.worker", "lib.gone", followed={"lib.work.worker.Worker"}, members={"stop", "rank"})
    assert [name for name in found if found[name] is None] == ["lib.gone"]
    assert sorted(found) == ["lib", "lib.base", "lib.gone", "lib.work.worker"]
    assert found["lib"] == {"imports": {"Base": "lib.base.Base"}}
    assert found["lib.base"] is not None
    classes = found["lib.base"]["classes"]
    assert classes["Base"]["attributes"] == ["rank"]
    assert list(classes["Root"]["methods"]) == ["stop"]


def test_bases_without_kept_facts_are_left_out() -> None:
    found = facts("lib.work.worker", names={"Worker.start"})
    assert list(found) == ["lib.work.worker"]


def test_imported_names_are_followed_to_their_module() -> None:
    found = facts("lib.work.worker", followed={"lib.work.worker.imported"})
    assert found == {
        "lib.tools": {"functions": {"run": {"async": False, "parameters": ["x"]}}},
        "lib.work.worker": {"imports": {"imported": "lib.tools.run"}},
    }


@pytest.mark.parametrize(
    "parameters",
    ["self", "a, b=1", "a, /", "a=1, /, b=2", "*, a", "*args, a=1", "a, *, b: int = 3, c, **d: str", "**d", ""],
)
def test_parameters_equal_the_source(parameters: str) -> None:
    module = Module("m", f"def f({parameters}): ...", is_package=False)
    found = collect(lambda name: module, ["m"], Wanted(names={"f"}))
    assert found["m"] is not None
    listed = ", ".join(found["m"]["functions"]["f"]["parameters"])
    assert ast.dump(ast.parse(f"def f({listed}): ...")) == ast.dump(ast.parse(f"def f({parameters}): ..."))


def test_a_stored_file_can_be_read_and_changes_are_listed() -> None:
    before = facts("lib.work.worker", "lib.gone", names={"Worker", "Worker.start", "run"})
    after = json.loads(pretty(before))
    assert after == before
    assert all(len(line) <= 120 for line in pretty(before).splitlines())
    worker = after["lib.work.worker"]
    worker["classes"]["Worker"]["methods"]["begin"] = worker["classes"]["Worker"]["methods"].pop("start")
    worker["functions"]["run"]["parameters"] = ["key"]
    assert [line.split(":")[0] for line in make._changes(before, after)] == [
        "+ lib.work.worker.Worker.begin",
        "- lib.work.worker.Worker.start",
        "~ lib.work.worker.run",
    ]


modules = st.dictionaries(st.sampled_from("abc"), st.sampled_from([None, {"x": 1}, {"x": 2}]))


@given(puts=st.lists(st.tuples(st.sampled_from(["1.0", "1.9", "1.10", "2.0"]), st.sampled_from("pq"), modules)))
def test_the_last_stored_facts_of_each_release_are_kept(puts: list[tuple[str, str, dict[str, Facts | None]]]) -> None:
    store = Store()
    for version, distribution, found in puts:
        store.put(version, distribution, found)
    last = {version: (distribution, found) for version, distribution, found in puts}
    assert store.versions() == [version for version in ("1.0", "1.9", "1.10", "2.0") if version in last]
    for version, (distribution, found) in last.items():
        assert store.release(version) == found
        assert version in store.distributions[distribution].split()
    for variants in store.modules.values():
        assert len({json.dumps(variant.facts) for variant in variants}) == len(variants)
    store.keep({"1.9", "2.0"})
    assert store.versions() == [version for version in ("1.9", "2.0") if version in last]
    assert all(store.release(version) == last[version][1] for version in store.versions())
