"""The table of runs says which modules read what a run leaves."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.real.run_table import RUNS

# Fixtures that are one run after the other.
SEVERAL = {"profiled": ("v1", "legacy"), "unprofiled": ("v1_off", "legacy_off")}


def used(module: Path) -> set[str]:
    """The runs whose fixtures a module's functions take, and it does not make itself."""
    functions = [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.FunctionDef)]
    taken = {argument.arg for function in functions for argument in function.args.args}
    taken -= {function.name for function in functions}
    return {run for name in taken for run in SEVERAL.get(name, (name,))} & set(RUNS)


def test_each_module_that_takes_a_run_is_in_the_table() -> None:
    modules = {path.stem: path for path in Path(__file__).parent.glob("test_*.py")}
    taken = {(name, run) for name, path in modules.items() for run in used(path)}
    told = {(name, run) for run, planned in RUNS.items() for name in planned.serves}
    assert taken <= told
    # A name that a module asks for in other ways is a text there.
    for name, run in told - taken:
        assert f'"{run}"' in modules[name].read_text(), (name, run)
