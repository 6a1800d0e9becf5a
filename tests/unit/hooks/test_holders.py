"""Replacement of a hooked function in modules and tables that held it before the hook was applied."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from autoprof.hooks import patching, registry

BEHAVIOUR = SimpleNamespace(supply=lambda *args: False, install=lambda *args: False, layer=0)
DEFINES = """
def function(value): return value
class Holder:
    def method(self, value): return value
    @staticmethod
    def static(value): return value
"""


def bound(module: str, attribute: str) -> Any:
    hook = SimpleNamespace(rewrap="", around="call", attribute=attribute, module=module)
    return SimpleNamespace(key=f"toy/{module}.{attribute}", behaviour=BEHAVIOUR, hook=hook)


def apply(module: ModuleType, attribute: str) -> None:
    patching._patch(bound(module.__name__, attribute), module, attribute)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Makes a module whose code has just run, as its hooks are applied then."""

    def made(name: str, source: str) -> ModuleType:
        module = ModuleType(name)
        module.__spec__ = importlib.util.spec_from_loader(name, None)
        module.__spec__._initializing = True  # type: ignore[union-attr]
        monkeypatch.setitem(sys.modules, name, module)
        exec(source, module.__dict__)
        return module

    made("toy", "__path__ = []")
    return made


@pytest.mark.parametrize("attribute", ["function", "Holder.method", "Holder.static"])
@pytest.mark.parametrize("table", ["{{'x': {}}}", "[0, {}]", "collections.OrderedDict(x={})", "[{}, {}]"])
def test_a_table_gets_the_function_that_its_name_has(make: Any, attribute: str, table: str) -> None:
    toy = make("toy.one", f"import collections\n{DEFINES}\ntable = {table.format(attribute, attribute)}\n")
    apply(toy, attribute)
    items = toy.table.values() if isinstance(toy.table, dict) else [each for each in toy.table if each != 0]
    named = toy.function if attribute == "function" else getattr(toy.Holder, attribute.partition(".")[2])
    assert all(each is named and hasattr(each, "__wrapped__") for each in items)
    assert pickle.loads(pickle.dumps(toy.table)) == toy.table


@pytest.mark.parametrize("attribute", ["function", "Holder.method", "Holder.static"])
def test_no_search_if_only_its_module_holds_a_function(
    make: Any, attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patching, "replace_in_holders", lambda *args: pytest.fail("it was looked for"))
    toy = make("toy.one", DEFINES)
    apply(toy, attribute)
    owner = toy if attribute == "function" else toy.Holder
    assert hasattr(getattr(owner, attribute.rpartition(".")[2]), "__wrapped__")


def test_another_package_keeps_its_tables_and_other_names(make: Any) -> None:
    toy = make("toy.one", DEFINES)
    other = make("other", "from toy.one import function\nname = function\ntable = [function]\n")
    apply(toy, "function")
    assert other.function is toy.function
    assert other.name is other.table[0] is toy.function.__wrapped__


def test_a_name_with_its_own_hook_gets_no_other(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = make("toy.one", f"{DEFINES}\nother = another = function\n")
    monkeypatch.setitem(registry.bound, "toy/other", bound("toy.one", "other"))
    apply(toy, "function")
    assert toy.another is toy.function
    assert toy.other is toy.function.__wrapped__


def test_a_hook_on_an_imported_name_leaves_the_module_that_defines_the_function(make: Any) -> None:
    make("toy.one", DEFINES)
    two = make("toy.two", "from toy.one import function\n")
    apply(two, "function")
    assert hasattr(two.function, "__wrapped__")
    assert sys.modules["toy.one"].function is two.function.__wrapped__


def test_a_table_of_a_module_that_runs_as_main_is_searched(make: Any) -> None:
    toy = make("toy.one", f"__name__ = '__main__'\n{DEFINES}\ntable = [Holder.method]\n")
    toy.__name__ = "toy.one"
    assert toy.Holder.method.__module__ == "__main__"
    apply(toy, "Holder.method")
    assert toy.table == [toy.Holder.method]
    assert hasattr(toy.Holder.method, "__wrapped__")


def test_a_table_of_data_is_not_searched(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "MAX_TABLE_ITEMS", 3)
    toy = make("toy.one", f"{DEFINES}\nshort, long = [function] * 3, [function] * 4\n")
    apply(toy, "function")
    assert toy.short == [toy.function] * 3
    assert toy.long == [toy.function.__wrapped__] * 4


def test_objects_whose_attributes_raise_are_ignored(make: Any) -> None:
    refusing = """
class Refuses:
    @property
    def __dict__(self): raise RuntimeError("no")
class Slots:
    __slots__ = ("table",)
    def __init__(self): self.table = [function]
refuses, slots, table = Refuses(), Slots(), [function]
"""
    toy = make("toy.one", DEFINES + refusing)
    apply(toy, "function")
    assert toy.table == [toy.function]
    assert toy.slots.table == [toy.function.__wrapped__]


def test_a_lazy_module_is_not_loaded(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazy.py").write_text("raise ImportError('it was loaded')\n")
    spec = importlib.util.spec_from_file_location("toy.lazy", tmp_path / "lazy.py")
    assert spec is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "toy.lazy", lazy := importlib.util.module_from_spec(spec))
    spec.loader.exec_module(lazy)
    toy = make("toy.one", f"{DEFINES}\ntable = [function]\n")
    apply(toy, "function")
    assert toy.table == [toy.function]
    with pytest.raises(ImportError, match="it was loaded"):
        _ = lazy.anything
