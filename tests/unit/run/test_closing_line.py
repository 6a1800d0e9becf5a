"""The line at the end of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from autoprof.run.end import executed_steps
from tests.support import helpers
from tests.support.recipe_texts import Hook
from tests.support.small_trainer import HOOKS, STEP, UPDATE, plain
from tests.support.timelines import step, timeline

RUN = "from small import *\nTrainer().fit(steps=4)\n"


def lines(folder: Path, code: str = RUN, hooks: Sequence[Hook] = HOOKS, **variables: str) -> list[str]:
    """Return autoprof's lines on stderr from a run of a script, with the id of the run replaced."""
    known = {"AUTOPROF_LOG": "notice", "AUTOPROF_RUN_ID": "made", "AUTOPROF_MIN_FREE_MB": "1"}
    done = plain(folder, code, hooks=hooks, check=True, **known | variables)
    return [line for line in done.stderr.splitlines() if line.startswith("autoprof")]


@pytest.mark.needs("torch")
def test_captures_are_counted(tmp_path: Path) -> None:
    expected = "autoprof: 2 captures in autoprof_runs/made; autoprof report shows them"
    assert lines(tmp_path, f"import torch\n{RUN}", AUTOPROF_STEPS="2,4") == [expected]


def test_captures_without_a_trace_are_not_said_to_be_shown(tmp_path: Path) -> None:
    place = "autoprof_runs/made"
    expected = f"autoprof: 2 captures in {place}, without a trace; autoprof doctor {place} shows why"
    assert lines(tmp_path, AUTOPROF_STEPS="2,4") == [expected]


@pytest.mark.needs("torch")
def test_another_folder_is_named_in_the_command(tmp_path: Path) -> None:
    place = tmp_path / "elsewhere" / "made"
    expected = f"autoprof: 1 capture in {place}; autoprof report {place} shows it"
    folder = tmp_path / "work"
    folder.mkdir()
    assert lines(folder, f"import torch\n{RUN}", AUTOPROF_STEPS="2", AUTOPROF_DIR=str(place.parent)) == [expected]


@pytest.mark.parametrize(
    ("settings", "hooks", "expected"),
    [
        ({"AUTOPROF_STEPS": "99"}, HOOKS, "no step was captured: AUTOPROF_STEPS=99, steps 1 to 4 ran"),
        (
            {"AUTOPROF_STEPS": "99", "AUTOPROF_WHEN": "step>2x"},
            HOOKS,
            "no step was captured: AUTOPROF_STEPS=99, AUTOPROF_WHEN=step>2x, steps 1 to 4 ran",
        ),
        (
            {"AUTOPROF_STEPS": ""},
            HOOKS,
            "steps 1 to 4 are on the timeline in autoprof_runs/made; autoprof report shows it",
        ),
        (
            {"AUTOPROF_STEPS": "2"},
            [STEP],
            "no step was captured, although step 2 ran; autoprof doctor autoprof_runs/made shows why",
        ),
        (
            {"AUTOPROF_STEPS": "2"},
            [UPDATE],
            "no step was captured: no step was recorded; autoprof doctor autoprof_runs/made shows why",
        ),
        ({"AUTOPROF_STEPS": "99", "AUTOPROF_LOG": "warning"}, HOOKS, ""),
    ],
)
def test_a_run_without_captures_gives_the_reason(
    tmp_path: Path, settings: dict[str, str], hooks: Sequence[Hook], expected: str
) -> None:
    assert lines(tmp_path, hooks=hooks, **settings) == ([f"autoprof: {expected}"] if expected else [])


def test_a_run_that_was_switched_off_says_so(tmp_path: Path) -> None:
    code = f"{RUN}open('autoprof_runs/made/control/off', 'w').close()\nTrainer().fit(steps=1)\n"
    expected = "no step was captured: AUTOPROF_STEPS=99, steps 1 to 4 ran, then autoprof was switched off"
    assert lines(tmp_path, code, AUTOPROF_STEPS="99")[-1] == f"autoprof: {expected}"


def test_many_steps_with_gaps_are_not_listed(tmp_path: Path) -> None:
    code = "from small import *\nwork = Trainer()\nfor work.global_step in range(10, 910, 10): work.step()\n"
    expected = "autoprof: no step was captured: AUTOPROF_STEPS=99, 90 steps from 10 to 900 ran"
    assert lines(tmp_path, code, AUTOPROF_STEPS="99") == [expected]


def test_a_run_of_several_processes_has_one_line(tmp_path: Path) -> None:
    code = f"import os\n{RUN}if not os.fork(): Trainer().fit(steps=1); sys.exit()\nos.wait()\n"
    assert len(lines(tmp_path, code, AUTOPROF_STEPS="99")) == 1


def test_programs_of_a_starter_without_hooks_share_one_line(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(RUN)
    code = """
import subprocess, sys
programs = [subprocess.Popen([sys.executable, "worker.py"]) for _ in range(2)]
assert [program.wait() for program in programs] == [0, 0]
"""
    expected = "autoprof: no step was captured: AUTOPROF_STEPS=99, steps 1 to 4 ran"
    assert lines(tmp_path, code, AUTOPROF_STEPS="99") == [expected]


@pytest.mark.parametrize(
    "end",
    [
        "sys.stderr.close()",
        "import os; os.close(2); file = open('own', 'w'); assert file.fileno() == 2",
        "import os; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 2)",
        "sys.stderr = None",
    ],
)
def test_a_stderr_that_the_program_closed_gets_no_line(tmp_path: Path, end: str) -> None:
    assert lines(tmp_path, f"{RUN}{end}\n", AUTOPROF_STEPS="99") == []
    assert not (tmp_path / "own").exists() or (tmp_path / "own").read_text() == ""


def test_a_replaced_stderr_gets_the_line(tmp_path: Path) -> None:
    """As in notebooks and test runners."""
    code = f"import atexit, io\natexit.register(lambda: open('seen', 'w').write(sys.stderr.getvalue()))\n{RUN}"
    assert lines(tmp_path, f"import sys\n{code}sys.stderr = io.StringIO()\n", AUTOPROF_STEPS="99") == []
    expected = "autoprof: no step was captured: AUTOPROF_STEPS=99, steps 1 to 4 ran\n"
    assert (tmp_path / "seen").read_text() == expected


def test_the_line_of_a_test_runner_follows_its_summary(tmp_path: Path) -> None:
    test = "from small import *\ndef test(): Trainer().fit(steps=4)"
    code = f"import pytest, sys\nopen('test_one.py', 'w').write({test!r})\n"
    (line,) = lines(tmp_path, f"{code}pytest.main(['-q', '-s', '-p', 'no:cacheprovider'])\n", AUTOPROF_STEPS="99")
    assert line == "autoprof: no step was captured: AUTOPROF_STEPS=99, steps 1 to 4 ran"


@pytest.mark.parametrize("command", [["-c", "pass"], ["-m", "pip", "--version"]])
def test_programs_that_are_no_runs_have_no_line(tmp_path: Path, command: list[str]) -> None:
    done = helpers.run([sys.executable, *command], cwd=tmp_path, check=True, AUTOPROF="1", AUTOPROF_LOG="notice")
    assert done.stderr == ""


def test_only_rank_0_of_several_trainers_is_read(tmp_path: Path) -> None:
    first = [step(1, rank=0), step(2, 2, 1, rank=0)]
    assert executed_steps(timeline(tmp_path / "several", a=first, b=[step(1, 7, rank=1)])) == [1, 2]
    assert executed_steps(timeline(tmp_path / "other", b=[step(1, 7, rank=1)])) == [7]
