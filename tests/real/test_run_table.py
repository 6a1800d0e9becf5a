"""The table of runs lists the modules that read the files of each run."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.real.run_table import RUNS

# Fixtures with several runs as parameters.
SEVERAL = {"profiled": ("v1", "legacy"), "unprofiled": ("v1_off", "legacy_off")}


def used(module: Path) -> set[str]:
    """Return the runs whose fixtures the functions of a module take, without fixtures of the module itself."""
    functions = [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.FunctionDef)]
    taken = {argument.arg for function in functions for argument in function.args.args}
    taken -= {function.name for function in functions}
    return {run for name in taken for run in SEVERAL.get(name, (name,))} & set(RUNS)


def test_each_module_that_takes_a_run_is_in_the_table() -> None:
    modules = {path.stem: path for path in Path(__file__).parent.glob("test_*.py")}
    taken = {(name, run) for name, path in modules.items() for run in used(path)}
    listed = {(name, run) for run, planned in RUNS.items() for name in planned.serves}
    assert taken <= listed
    # A fixture that a module requests by name is a text in the module.
    for name, run in listed - taken:
        assert f'"{run}"' in modules[name].read_text(), (name, run)
