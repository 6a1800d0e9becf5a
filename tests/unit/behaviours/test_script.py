"""Runs of scripts that mark their own loop (`autoprof.start`, `stop`, `step`, `stage`), and of cells of a notebook."""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import autoprof
from autoprof.rundir import runs
from tests.support import helpers
from tests.support.helpers import ROOT, TORCH, Python, spans

BEGIN = "import autoprof, os\n"


def only_run(folder: Path) -> Path:
    """Return the folder of the only run."""
    (run,) = runs.runs(folder)
    return Path(run.path)


def seen(run: Path) -> list[tuple[Any, ...]]:
    """Return the steps and stages of a timeline, in the order of their ends."""
    found = sorted(spans(run), key=lambda span: span["end_ns"])
    return [(span["step"], span["role"], span["name"]) for span in found if span["kind"] in ("step", "stage")]


def test_blocks_outside_of_a_run_are_one_object_and_import_next_to_nothing(python: Python) -> None:
    code = """
import autoprof, sys
block = autoprof.step(7)
assert block is autoprof.stage("learn", role="actor") is autoprof.step()
with block, block:
    pass
assert autoprof.stop() is None
print(*sorted(name for name in sys.modules if name == "msgspec" or "dispatch" in name))
"""
    assert python(code.replace("assert autoprof.stop() is None\n", "")).stdout.strip() == ""
    python(code)


def test_a_stage_knows_that_it_is_in_another_thread_or_task_than_its_step(python: Python, tmp_path: Path) -> None:
    code = """
import asyncio, threading
def work(name):
    with autoprof.stage(name, role=name):
        pass
async def task(name):
    work(name)
async def main():
    with autoprof.step(2):
        await task("here")
        await asyncio.create_task(task("a task"))
        await asyncio.to_thread(work, "called")
autoprof.start("", dir="runs")
with autoprof.step(1):
    work("main")
    (thread := threading.Thread(target=work, args=("a thread",))).start()
    thread.join()
asyncio.run(main())
work("none")
autoprof.stop()
"""
    python(BEGIN + code)
    stages = [span for span in spans(only_run(tmp_path / "runs")) if span["kind"] == "stage"]
    assert {span["name"] for span in stages if span.get("beside")} == {"a thread", "a task"}
    assert len(stages) == 6


def test_a_marked_loop_records_as_with_a_recipe_until_it_is_stopped(python: Python, tmp_path: Path) -> None:
    code = """
before = dict(os.environ)
for steps, dir in (("2", "first"), ("+1", "second")):
    run = autoprof.start(steps, dir=dir, contents=["cpu"])
    for number in range(1, 4):
        with autoprof.step(number), autoprof.stage("learn", role="actor"):
            torch.ones(3) + 1
    assert autoprof.stop() == run
    assert not list(run.rglob("*.part"))
    with autoprof.step(9):
        pass
after = dict(os.environ)
after.pop("AUTOPROF_RECIPES_FOUND", None)
assert after == before
autoprof.start("+1", dir="stopped")
with autoprof.step():
    with autoprof.stage("learn"):
        autoprof.stop()
    with autoprof.stage("late"):
        pass
"""
    python(TORCH + BEGIN + code)
    for folder, step in (("first", 2), ("second", 1)):
        run = runs.read(only_run(tmp_path / folder))
        assert [(each.number, [one.state for one in each.captures]) for each in run.steps] == [(step, ["complete"])]
        assert run.captures[0].meta.contents == ["cpu"]
        assert run.state == "ended"
        assert seen(Path(run.path)) == [
            each for number in (1, 2, 3) for each in ((number, "actor", "learn"), (number, "trainer", "step"))
        ]
    stopped = runs.read(only_run(tmp_path / "stopped"))
    assert seen(Path(stopped.path)) == [(1, "trainer", "learn"), (1, "trainer", "step")]
    (capture,) = stopped.captures
    assert (capture.state, capture.meta.reason) == ("truncated", "autoprof.stop() was called during the stage")


def test_exceptions_pass_through_blocks_unchanged(python: Python, tmp_path: Path) -> None:
    code = """
autoprof.start("")
for kind in (ValueError, StopIteration, KeyboardInterrupt, GeneratorExit):
    raised = kind("x")
    try:
        with autoprof.step(), autoprof.stage("learn"):
            raise raised
    except BaseException as error:
        assert error is raised and error.__context__ is None, repr(error)
        assert error.__traceback__.tb_next is None
"""
    python(BEGIN + code)
    said = [(span["kind"], span["step"], span.get("error")) for span in spans(only_run(tmp_path / "autoprof_runs"))]
    kinds = ("ValueError", "StopIteration", "KeyboardInterrupt", "GeneratorExit")
    assert said == [(kind, step, name) for step, name in enumerate(kinds, 1) for kind in ("stage", "step")]


def test_stages_of_threads_and_tasks_and_nested_steps(python: Python, tmp_path: Path) -> None:
    code = """
import asyncio, threading
autoprof.start("")
def generate(role):
    with autoprof.stage("generate", role=role, rank=3):
        together.wait()
async def score(role):
    with autoprof.stage("score", role=role):
        await asyncio.sleep(0)
async def both():
    await asyncio.gather(score("c"), score("d"))
with autoprof.step(5):
    together = threading.Barrier(2)
    threads = [threading.Thread(target=generate, args=(role,)) for role in "ab"]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    asyncio.run(both())
    with autoprof.step(6), autoprof.stage("outer", role="e"), autoprof.stage("inner", role="e"):
        pass
"""
    done = python(BEGIN + code)
    run = only_run(tmp_path / "autoprof_runs")
    assert sorted(seen(run)) == [
        *((5, role, "generate") for role in "ab"),
        *((5, role, "score") for role in "cd"),
        (5, "e", "outer"),
        (5, "trainer", "step"),
    ]
    assert {span["rank"] for span in spans(run) if span["name"] == "generate"} == {3}
    assert done.stderr.count("a step begins inside another step") == 1


def test_a_stage_lasts_until_the_last_thread_of_its_role_has_ended(python: Python, tmp_path: Path) -> None:
    code = """
import threading
autoprof.start("")
begun, ended = threading.Event(), threading.Event()
def first():
    with autoprof.stage("generate", role="rollout"):
        begun.wait()
    ended.set()
def last():
    with autoprof.stage(NAME, role="rollout"):
        begun.set()
        ended.wait()
        with autoprof.stage("after", role="actor"):
            pass
for NAME in ("generate", "generate more"):
    begun.clear(), ended.clear()
    with autoprof.step():
        (thread := threading.Thread(target=first)).start()
        while not autoprof.behaviours.stages.running:
            pass
        last()
        thread.join()
"""
    python(BEGIN + "import autoprof.behaviours.stages\n" + code)
    stages = {(span["step"], span["name"]): span for span in spans(only_run(tmp_path / "autoprof_runs"))}
    assert all((step, "generate more") not in stages for step in (1, 2))
    assert all(stages[step, "generate"]["end_ns"] >= stages[step, "after"]["end_ns"] for step in (1, 2))


def test_a_capture_without_a_profiler_delays_the_stage_by_no_import(python: Python, tmp_path: Path) -> None:
    code = """
import sys
autoprof.start("1", dir="runs")
with autoprof.step(1), autoprof.stage("learn", role="actor"):
    assert "ctypes" not in sys.modules
autoprof.stop()
"""
    python(BEGIN + code)
    assert [one.state for one in runs.read(only_run(tmp_path / "runs")).captures] == ["complete"]


def test_a_block_that_is_never_left_ends_with_its_object(python: Python, tmp_path: Path) -> None:
    """A signal may raise between the block's `__enter__` and its first line; Python then calls no `__exit__`."""
    code = """
autoprof.start("")
for block in (autoprof.stage("learn", role="actor"), autoprof.step(1)):
    block.__enter__()
del block
with autoprof.step(2), autoprof.stage("learn", role="actor"):
    pass
"""
    python(BEGIN + code)
    found = seen(only_run(tmp_path / "autoprof_runs"))
    assert found[-2:] == [(2, "actor", "learn"), (2, "trainer", "step")]
    assert [name for _, _, name in found[:-2]] == ["learn", "step"]


def test_a_forked_child_leaves_the_step_to_its_parent(python: Python, tmp_path: Path) -> None:
    code = """
autoprof.start("")
with autoprof.step():
    if not os.fork():
        with autoprof.step(2):
            pass
        os._exit(0)
    os.wait()
"""
    python(BEGIN + code)
    assert sorted(seen(only_run(tmp_path / "autoprof_runs"))) == [(1, "trainer", "step"), (2, "trainer", "step")]


def test_an_impossible_start_raises_and_leaves_no_files(python: Python, tmp_path: Path) -> None:
    code = """
before = dict(os.environ)
for given in ({"steps": "abc"}, {"stepz": 1}, {"mode": "fast"}, {"dir": "/proc/x"}):
    try:
        autoprof.start(**given)
    except (ValueError, OSError) as error:
        print(type(error).__name__, error)
assert dict(os.environ) == before
autoprof.start(steps=3, ranks="all", roles=["actor"])
try:
    autoprof.start()
except RuntimeError as error:
    print(error)
"""
    said = python(BEGIN + code).stdout.splitlines()
    assert said[0].startswith("SettingsError steps: got 'abc' (")
    assert said[1] == "SettingsError 'stepz': there is no such setting here; did you mean 'steps'?"
    assert said[2] == "SettingsError mode: got 'fast'; it takes discrete or continuous"
    assert said[3].startswith("FileNotFoundError can't write to /proc/x/") or said[3].startswith("OSError can't write")
    run = only_run(tmp_path / "autoprof_runs")
    assert said[4:] == [f"a run is already active, in {run}; autoprof.stop() ends it"]
    settings = json.loads((run / "run.json").read_text())["settings"]
    assert (settings["steps"], settings["ranks"], settings["roles"]) == ("3", "all", ["actor"])


def test_the_environment_counts_more_than_the_script(python: Python, tmp_path: Path) -> None:
    code = """
run = autoprof.start(steps="7")
print(run)
with autoprof.step(7), autoprof.stage("learn"):
    pass
print(autoprof.stop())
with autoprof.step(8):
    pass
"""
    off = python(BEGIN + code, AUTOPROF="0")
    assert off.stdout == "None\nNone\n"
    assert off.stderr == "autoprof: AUTOPROF=0 in the environment: autoprof.start() starts nothing\n"
    assert not (tmp_path / "autoprof_runs").exists()
    on = python(BEGIN + code, AUTOPROF="1", AUTOPROF_STEPS="")
    run = only_run(tmp_path / "autoprof_runs")
    assert on.stdout == f"{run}\n{run}\n"
    assert "autoprof.start() ignores steps" in on.stderr
    assert [number for number, _, name in seen(run) if name == "step"] == [7, 8]
    assert runs.read(run).state == "ended"


def test_ranks_of_a_launcher_share_a_run(tmp_path: Path) -> None:
    code = BEGIN + "print(autoprof.start(''))\nwith autoprof.step(1): pass\nautoprof.stop()"
    ranks = [
        helpers.started([sys.executable, "-c", code], cwd=tmp_path, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
        for rank in ("1", "0")
    ]
    folders = {rank.communicate(timeout=100)[0].strip() for rank in ranks}
    run = only_run(tmp_path / "autoprof_runs")
    assert folders == {str(run)}
    assert json.loads((run / "run.json").read_text())["pid"] == ranks[1].pid
    assert sorted(span["rank"] for span in spans(run)) == [0, 1]
    assert (runs.read(run).state, len(os.listdir(run / "journal"))) == ("ended", 2)


def test_the_types_match_the_functions() -> None:
    tree = ast.parse((ROOT / "autoprof" / "__init__.pyi").read_text())
    typed = {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == set(autoprof._HOMES)
    assert typed <= set(dir(autoprof))
    with pytest.raises(AttributeError, match="has no attribute 'begin'"):
        autoprof.begin  # noqa: B018


def test_a_run_that_was_stopped_has_not_failed_where_its_process_does(python: Python, tmp_path: Path) -> None:
    code = """
autoprof.start('')
with autoprof.step():
    pass
autoprof.stop()
if not os.fork():
    raise SystemExit(3)
os.wait()
raise ValueError
"""
    assert python(BEGIN + code, check=False).returncode == 1
    (run,) = runs.runs(tmp_path / "autoprof_runs")
    assert run.outcome == "ended"


def test_blocks_without_names_raise_nothing(python: Python, tmp_path: Path) -> None:
    code = """
with autoprof.step(1):
    for values in (("a", None), (None, "b"), (None, None), ("", "c")):
        with autoprof.stage(values[0], role=values[1]):
            print("done")
"""
    result = python(BEGIN + code, AUTOPROF="1", AUTOPROF_DIR=str(tmp_path))
    assert result.stdout.split() == ["done"] * 4
    assert result.stderr.count('a stage without a name is recorded as "stage"') == 1
    assert (1, "c", "stage") in seen(only_run(tmp_path))


def test_a_number_that_no_file_can_have_is_no_step(python: Python, tmp_path: Path) -> None:
    code = """
for number in (1, 2**63, 2**53, 2):
    with autoprof.step(number), autoprof.stage("learn"):
        pass
"""
    shown = python(BEGIN + code, AUTOPROF="1", AUTOPROF_DIR=str(tmp_path)).stderr
    assert f"ValueError: number = 'number' is {2**63}, which is not a step number" in shown
    run = only_run(tmp_path)
    assert [step for step, _, name in seen(run) if name == "step"] == [1, 2**53, 2]
    assert not any(state.damaged for state in runs.read(run).processes)


def test_a_process_that_caught_its_exception_did_not_die(python: Python, tmp_path: Path) -> None:
    child = """
import autoprof
try:
    with autoprof.stage("reward", role="reward"):
        raise ValueError("caught")
except ValueError:
    pass
"""
    code = f"""
import subprocess, sys
with autoprof.step(1):
    subprocess.run([sys.executable, "-c", {child!r}], check=True)
"""
    python(BEGIN + code, AUTOPROF="1", AUTOPROF_DIR=str(tmp_path))
    run = only_run(tmp_path)
    assert any(name == "reward" for _, _, name in seen(run))
    assert json.loads((run / "run.json").read_text()).get("died", []) == []


# The part of IPython's shell that the magic uses.
SHELL = """
import autoprof
class Result:
    error_before_exec = error_in_exec = None
    def raise_error(self):
        if self.error_in_exec is not None:
            raise self.error_in_exec
class Shell:
    def register_magic_function(self, function, magic_kind):
        assert magic_kind == "cell"
        self.magic = function
    def run_cell(self, cell):
        result = Result()
        try:
            exec(cell, globals())
        except BaseException as error:
            result.error_in_exec = error
        return result
shell = Shell()
autoprof.load_ipython_extension(shell)
"""


def test_a_cell_is_a_step_of_a_new_run(python: Python, tmp_path: Path) -> None:
    code = """
shell.magic("--contents cpu,shapes --dir=runs", "x = torch.ones(3) + 1")
print(x.sum().item(), autoprof.stop())
"""
    said = python(TORCH + SHELL + code).stdout.splitlines()
    (run,) = runs.runs(tmp_path / "runs")
    (capture,) = run.captures
    assert (run.state, capture.state, capture.meta.role, capture.meta.contents) == (
        "ended",
        "complete",
        "notebook",
        ["cpu", "shapes"],
    )
    trace = Path(run.path) / "global_step_000001" / f"{capture.name}.pt.trace.json.gz"
    assert said[0].startswith(f"autoprof: {trace} (")
    assert said[1:] == ["6.0 None"]


def test_a_cell_is_a_step_of_the_active_run(python: Python, tmp_path: Path) -> None:
    code = """
run = autoprof.start("")
shell.magic("", "x = 1")
shell.magic("", "1 / 0")
with autoprof.step(7):
    pass
assert autoprof.stop() == run
"""
    said = python(TORCH + SHELL + code).stdout.splitlines()
    (run,) = runs.runs(tmp_path / "autoprof_runs")
    assert said == [
        f"autoprof: step {number} of {run.path} is on the timeline; it was not captured" for number in (1, 2)
    ]
    steps = [(span["step"], span.get("error")) for span in spans(Path(run.path)) if span["kind"] == "step"]
    assert steps == [(1, None), (2, "ZeroDivisionError"), (7, None)]


def test_ipython_has_the_magic(python: Python, tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    code = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in (
    "%load_ext autoprof",
    "import autoprof; run = autoprof.start('')",
    "%%autoprof\\nx = 1",
    "%%autoprof --dir x\\nx = 2",
    "autoprof.stop();",
    "%%autoprof --mode fast\\nx = 3",
    "%%autoprof fast\\nx = 4",
    "print(x)",
):
    shell.run_cell(cell)
"""
    done = python(code)
    said = done.stdout.splitlines() + done.stderr.splitlines()
    assert sum("is on the timeline" in line for line in said) == 1
    usage = [line.partition("%%autoprof: ")[2].split(";")[0] for line in said if line.startswith("UsageError")]
    assert usage == ["a run is already active and keeps its settings", "mode: got 'fast'", "got 'fast'"]
    assert "1" in done.stdout.splitlines()
