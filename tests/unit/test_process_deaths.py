"""Processes that die, for different causes: the run names the process, the cause, and the open stage."""

from __future__ import annotations

import functools
import json
import re
import signal
from pathlib import Path

import pytest
import wrapt

from autoprof.cli import main
from autoprof.report import markdown
from autoprof.rundir import deaths, runs
from autoprof.rundir.layout import CRASHES
from autoprof.rundir.records import Death
from autoprof.rundir.runs import Run
from tests.support.helpers import Python
from tests.support.small_trainer import plain

# Program that runs the given code in step 2.
PROGRAM = """from small import *

def fetch_score(token):
    {0}

Trainer().fit(lambda: fetch_score("hf_abcdefghijklmnop"))
"""


@pytest.fixture
def go(tmp_path: Path) -> Python:
    """Return a function that runs a program which can import the small trainer."""
    return functools.partial(plain, tmp_path)


def the_run(folder: Path) -> Run:
    return runs.find(folder / "autoprof_runs", "latest")


def the_deaths(folder: Path) -> list[Death]:
    return deaths.find_in_run(the_run(folder))


def first(folder: Path) -> str:
    found = the_deaths(folder)
    return deaths.sentence(found[0]) if found else ""


WITHOUT_A_WORD = "actor rank 0 vanished in update_actor of step 2 (killed by a signal, or ended by os._exit)"


@pytest.mark.parametrize(
    ("does", "status", "state", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "unfinished", WITHOUT_A_WORD),
        ("os._exit(3)", 3, "unfinished", WITHOUT_A_WORD),
        (
            "os.kill(os.getpid(), signal.SIGTERM)",
            -signal.SIGTERM,
            "unfinished",
            "actor rank 0 was killed by SIGTERM in update_actor of step 2; it was in train.py:4 fetch_score",
        ),
        (
            "__import__('ctypes').string_at(0)",
            -signal.SIGSEGV,
            "unfinished",
            "actor rank 0 crashed (SIGSEGV) in update_actor of step 2: train.py:4 fetch_score",
        ),
        (
            "os.abort()",
            -signal.SIGABRT,
            "unfinished",
            "actor rank 0 crashed (SIGABRT) in update_actor of step 2: train.py:4 fetch_score",
        ),
        (
            "raise ValueError(f'no score for {token}')",
            1,
            "failed",
            (
                "actor rank 0 failed with ValueError: no score for *** in train.py:4 fetch_score, "
                "in update_actor of step 2"
            ),
        ),
        (
            "sys.exit(3)",
            3,
            "failed",
            "actor rank 0 exited with status 3 in train.py:4 fetch_score, in update_actor of step 2",
        ),
        # The exception of a thread does not end the process.
        ("thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()", 0, "ended", ""),
        ("pass", 0, "ended", ""),
    ],
)
def test_commands_report_how_the_process_died(
    go: Python, tmp_path: Path, does: str, status: int, state: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    died = go(PROGRAM.format(does))
    without = go(PROGRAM.format(does), AUTOPROF="0")
    assert (died.returncode, died.stderr.splitlines()[-1:]) == (status, without.stderr.splitlines()[-1:])
    assert without.returncode == status
    run = the_run(tmp_path)
    assert (run.state, first(tmp_path)) == (state, text)
    assert "hf_abcdefghijklmnop" not in "".join(
        path.read_text() for path in Path(run.path).rglob("*") if path.is_file()
    )
    assert main.main(["doctor", run.path]) == (1 if text else 0)
    doctor = " ".join(capsys.readouterr().out.split())
    assert (f"problems: - {text}" in doctor) == bool(text)
    main.main(["ls", run.path])
    assert (f"ls: {run.id}: {text}" in " ".join(capsys.readouterr().err.split())) == bool(text)
    assert main.main(["report", run.path, "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["text"] for finding in findings] == ([text] if text else [])
    assert [finding["remedy"].startswith("Find the sender of SIGTERM") for finding in findings] == [
        status == -signal.SIGTERM for _ in findings
    ]
    main.main(["report", run.path, "--md", "-"])
    # The finding shows no seconds.
    assert (f"\n- {markdown._safe(text)}\n" in capsys.readouterr().out) == bool(text)


# One attempt at a run. Before it dies, it prints for how many seconds the step has been open.
ATTEMPT = """from small import *

trainer = Trainer()
first, last, trainer.dies_in = map(int, os.environ["STEPS"].split())

def die():
    print(time.time() - began, flush=True)
    {0}

for trainer.global_step in range(first, last + 1):
    began = time.time()
    trainer.step(die)
"""
KILL, FAIL = "os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError('no score')"
GONE = "actor rank 0 vanished in update_actor of step {} (killed by a signal, or ended by os._exit)"
FAILED = "actor rank 0 failed with {} in train.py:8 die, in update_actor of step {}"
EARLIER = "in an earlier attempt, "


@pytest.mark.parametrize(
    ("attempts", "sentences", "open_steps"),
    [
        ([(KILL, "1 4 3"), ("pass", "2 5 0")], [], []),
        ([(KILL, "1 4 3"), (KILL, "2 5 3")], [GONE.format(3), EARLIER + GONE.format(3)], [3]),
        ([(KILL, "1 5 4"), (KILL, "2 5 3")], [GONE.format(3), EARLIER + GONE.format(4)], [3]),
        ([(KILL, "1 5 4"), (FAIL, "2 5 3")], [FAILED.format("ValueError: no score", 3), EARLIER + GONE.format(4)], []),
        (
            [(FAIL, "1 5 4"), ("raise KeyError('uid')", "4 6 5")],
            [FAILED.format("KeyError: 'uid'", 5), EARLIER + FAILED.format("ValueError: no score", 4)],
            [],
        ),
        (
            [(KILL, "1 2 2"), (KILL, "2 3 3"), (KILL, "3 4 4")],
            [GONE.format(4), EARLIER + GONE.format(3), EARLIER + GONE.format(2)],
            [4],
        ),
        (
            [("__import__('ctypes').string_at(0)", "1 2 2"), ("pass", "2 3 0")],
            ["in an earlier attempt, actor rank 0 crashed (SIGSEGV) in update_actor of step 2: train.py:8 die"],
            [],
        ),
    ],
)
def test_a_resumed_run_distinguishes_its_last_attempt_from_earlier_ones(
    go: Python,
    tmp_path: Path,
    attempts: list[tuple[str, str]],
    sentences: list[str],
    open_steps: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    last = [go(ATTEMPT.format(does), STEPS=steps, AUTOPROF_RUN_ID="one") for does, steps in attempts][-1]
    run = the_run(tmp_path)
    assert [deaths.sentence(death) for death in the_deaths(tmp_path)] == sentences
    evidence = deaths.evidence(the_deaths(tmp_path)) if sentences else []
    assert [line for line in evidence if line.startswith(("then", "in an earlier"))] == sentences[1:]
    assert main.main(["doctor", run.path, "--json"]) == bool(sentences)
    executed = json.loads(capsys.readouterr().out)["facts"]["steps executed"]
    assert re.findall(r"step (\d+) was open for (?:at least|an unknown)", executed) == [
        str(step) for step in open_steps
    ]
    main.main(["report", run.path, "--json"])
    steps = [row for row in json.loads(capsys.readouterr().out)["open"] if row["kind"] == "step"]
    assert [row["step"] for row in steps] == open_steps
    assert all(0 < row["age_s"] <= float(last.stdout) for row in steps)


PYTHON = "sys.executable, sys.executable"
VANISHED = "the process that started the run vanished (killed by a signal, or ended by os._exit or os.exec)"


@pytest.mark.parametrize(
    ("becomes", "status", "state", "text"),
    [
        (f"{PYTHON}, '-c', 'pass'", 0, "ended", ""),
        (f"{PYTHON}, '-c', 'from small import *; Trainer().fit()'", 0, "ended", ""),
        (f"{PYTHON}, '-c', 'exit(3)'", 3, "failed", "the process that started the run exited with status 3"),
        ("'/bin/sh', 'sh', '-c', 'exit 0'", 0, "unfinished", VANISHED),
    ],
)
def test_a_run_whose_process_calls_exec_ends_with_the_new_program(
    go: Python, tmp_path: Path, becomes: str, status: int, state: str, text: str
) -> None:
    go(ATTEMPT.format(KILL), STEPS="1 1 1", AUTOPROF_RUN_ID="one")
    done = go(f"from small import *\nTrainer().fit()\nos.execl({becomes})", AUTOPROF_RUN_ID="one")
    assert done.returncode == status
    run = the_run(tmp_path)
    assert (run.state, [attempt.state for attempt in run.info.earlier]) == (state, ["unfinished"])
    current = [deaths.sentence(death) for death in the_deaths(tmp_path) if not death.earlier]
    assert current == ([text] if text else [])


def test_an_empty_crash_file_is_removed(go: Python, tmp_path: Path) -> None:
    go(PROGRAM.format("pass"))
    assert not Path(the_run(tmp_path).path, CRASHES).exists()


# Two ranks that meet at a barrier in each step, as in a real trainer.
RANKS = """from small import *
import torch.distributed as dist
dist.init_process_group("gloo")

def meet():
    if dist.get_rank() == 1:
        {0}
    dist.barrier()

Trainer().fit(meet)
dist.destroy_process_group()
"""
# The launcher imports autoprof's dependencies before `site` has set all paths.
_PATH = f"{{}}/lib:{Path(wrapt.__file__).parent.parent}"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("does", "text", "long"),
    [
        ("sys.exit(3)", "actor rank 1 exited with status 3 in train.py:7 meet, in update_actor of step 2", False),
        ("os._exit(5)", "actor rank 1 exited with status 5 in update_actor of step 2", True),
        ("os.kill(os.getpid(), signal.SIGKILL)", "actor rank 1 was killed by SIGKILL in update_actor of step 2", False),
        (
            "raise KeyError('uid')",
            "actor rank 1 failed with KeyError: 'uid' in train.py:7 meet, in update_actor of step 2",
            True,
        ),
        (
            "__import__('ctypes').string_at(0)",
            "actor rank 1 crashed (SIGSEGV) in update_actor of step 2: train.py:7 meet",
            True,
        ),
        # Ray has a class with the same name.
        (
            "import torch; raise torch.OutOfMemoryError('CUDA out of memory')",
            (
                "actor rank 1 failed with OutOfMemoryError: CUDA out of memory in train.py:7 meet, "
                "in update_actor of step 2"
            ),
            False,
        ),
        ("pass", "", True),
    ],
)
@pytest.mark.needs("torch")
def test_the_rank_of_torchrun_that_died_first_is_named(
    go: Python,
    tmp_path: Path,
    does: str,
    text: str,
    long: bool,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if long:
        request.getfixturevalue("thorough")
    ended = go(RANKS.format(does), *TORCHRUN, AUTOPROF_RANKS="all", PYTHONPATH=_PATH.format(tmp_path))
    assert ended.returncode == (1 if text else 0), ended.stderr[-2000:]
    run = the_run(tmp_path)
    assert (run.state, first(tmp_path)) == ("failed" if text else "ended", text)
    main.main(["doctor", run.path])
    assert (f"problems: - {text}" in " ".join(capsys.readouterr().out.split())) == bool(text)
    main.main(["ls", run.path])
    assert (f"ls: {run.id}: {text}" in " ".join(capsys.readouterr().err.split())) == bool(text)
    main.main(["report", run.path, "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["text"] for finding in findings[:1]] == ([text] if text else [])
