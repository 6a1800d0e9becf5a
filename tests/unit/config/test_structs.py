"""Structs that several threads may read: msgspec has built their descriptions once their modules are imported."""

from __future__ import annotations

import json

from tests.support.helpers import Python

# Structs that msgspec never decodes in a run: they are only made, encoded or pickled, or only commands decode them.
NEVER_READ = {"BoundHook", "ProcessState", "JournalIndex", "_CachedStates", "_CachedStep"}
NEVER_READ |= {"RunningStage", "_ServerWindow", "_WatchedObject"}
# Structs of a run whose description needs Python code, because they contain other structs or literals. The behaviours
# of recipes are left out, since only one thread at a time reads them (`hooks/registry.py`).
DESCRIBED = """
import gc, importlib, json, pkgutil, typing, msgspec, autoprof
from autoprof.hooks.behaviour import Behaviour

def all_of(kind):
    for each in type.__subclasses__(kind):
        yield each
        yield from all_of(each)

def parts(kind):
    yield kind
    for each in typing.get_args(kind):
        yield from parts(each)

def helped(kind):
    try:
        fields = msgspec.structs.fields(kind)
    except NameError:  # a type that only a type checker imports; such a struct can't be read
        return False
    inner = [part for field in fields for part in parts(field.type)]
    holds = [part for part in inner if isinstance(part, type) and issubclass(part, msgspec.Struct)]
    return bool(holds) or typing.Literal in map(typing.get_origin, inner)

def described(kind):
    return any(type(each).__name__ == "StructInfo" for each in gc.get_referents(kind))

class Own(msgspec.Struct):
    pass

assert not described(Own)
msgspec.json.Decoder(Own)
assert described(Own)

for room in ("behaviours", "hooks", "capture", "windows", "run", "rundir", "config"):
    package = importlib.import_module(f"autoprof.{room}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if "finisher" not in module.name:
            importlib.import_module(module.name)
ours = [kind for kind in all_of(msgspec.Struct) if kind.__module__.startswith("autoprof.")]
kinds = [kind for kind in ours if not issubclass(kind, Behaviour) and helped(kind)]
print(json.dumps({kind.__name__: described(kind) for kind in kinds}))
"""


# Without that, 2 of 100 runs crashed in which several threads read the same struct first.
def test_structs_that_hold_others_are_described_before_threads_read_them(python: Python) -> None:
    found: dict[str, bool] = json.loads(python(DESCRIBED).stdout)
    assert {"RunFile", "ProcessLine", "Settings", "Became"} <= found.keys()
    assert {name for name, described in found.items() if not described} == NEVER_READ
