"""Rules for the time and the file of a process's records, checked from outside."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support import judged_runs
from tests.support.judged_runs import STAGES, WHOLE_STEP, Ended, Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# Points of a step -> spans that are open there, the innermost last.
PLACES = {
    "in the step": ["step"],
    "in generate": ["step", "generate"],
    "after generate": ["step"],
    "in update": ["step", "update_actor"],
    "in evaluate": ["step", "update_actor", "evaluate"],
    "after evaluate": ["step", "update_actor"],
    "after update": ["step"],
    "after the step": [],
}
ENDS = {"SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)", "os._exit": "os._exit(3)"}
KILLED = """
from small import *
trainer = Trainer()
def end(place):
    if (trainer.number, place) == (2, sys.argv[1]):
        {end}
trainer.fit(3, end)
"""


@pytest.mark.fault("SIGKILL or os._exit at any point of a step", "ends as without autoprof", "nothing")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("at", PLACES)
def test_doctor_names_the_stage_that_was_open_when_the_process_died_and_no_other(
    place: Place, at: str, end: str
) -> None:
    ended = place.ended(KILLED.format(end=ENDS[end]), at)
    assert (ended.status, ended.stderr) == (-signal.SIGKILL if end == "SIGKILL" else 3, "")
    inside = PLACES[at]
    (problem,) = judged_runs.problems(place.run)
    assert [name for name in STAGES if name in problem] == [name for name in inside[-1:] if name in STAGES]
    assert ("step 2" in problem) == bool(inside)
    assert judged_runs.opened(place.run) == sorted((name, 2) for name in inside)
    assert judged_runs.steps(place.run) == ([1] if inside else [1, 2])
    passed = list(PLACES).index(at)
    had_ended = [name for name, after in (("generate", 2), ("evaluate", 5), ("update_actor", 6)) if passed >= after]
    assert judged_runs.names(place.run, 2) == sorted(had_ended)


WORKERS = """
from small import *
if sys.argv[1:]:
    worker = Trainer()
    def end(place):
        if (worker.number, place) == (2, sys.argv[1]):
            os._exit(3)
    worker.fit(2, end)
for at in iter(input, "end"):
    subprocess.run([sys.executable, __file__, at])
    print(at, flush=True)
"""


def test_in_a_running_run_doctor_names_the_stage_that_was_open_when_a_worker_died(place: Place) -> None:
    started = place.start(WORKERS)
    for at, named in (("after the step", []), ("in update", ["update_actor"])):
        print(at, file=started.stdin, flush=True)
        assert started.stdout.readline() == f"{at}\n"
        found = judged_runs.problems(place.run)
        assert [name for name in STAGES if name in " ".join(found)] == named
    assert started.communicate("end\n") == ("", "")
    assert judged_runs.steps(place.run) == [1, 2]


FLUSHED = """
from small import *
trainer = Trainer()
def short():
    for name in ("a", "b", "c"):
        trainer.sample(name)
    print("there", flush=True)
    input()
trainer.fit(1, lambda place: place == "in update" and trainer.sample("long", short))
"""


def test_ended_samples_are_on_disk_while_the_program_waits(place: Place) -> None:
    started = place.start(FLUSHED)
    assert started.stdout.readline() == "there\n"
    deadline = time.monotonic() + 60
    while judged_runs.names(place.run, 1) != ["a", "b", "c", "generate"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    started.kill()
    started.communicate()
    assert judged_runs.names(place.run, 1) == ["a", "b", "c", "generate"]


MANY = """
from small import *
trainer = Trainer()
def many(place):
    if (trainer.number, place) == (2, "in update"):
        for number in range(18_000):
            trainer.sample(f"{number:0120}")
        os.kill(os.getpid(), signal.SIGKILL)
trainer.fit(3, many)
"""


def test_doctor_names_the_open_stage_after_5_mb_of_samples(place: Place) -> None:
    place.ended(MANY)
    (problem,) = judged_runs.problems(place.run)
    assert [name for name in STAGES if name in problem] == ["update_actor"]
    assert judged_runs.opened(place.run) == [("step", 2), ("update_actor", 2)]


CLOSING = """
from small import *
trainer = Trainer()
def close(place):
    if (trainer.number, place) == (2, sys.argv[1]):
        os.closerange(3, 1025)
        print(os.open(os.devnull, os.O_RDONLY), flush=True)
trainer.fit(4, close)
print(trainer.number)
"""
# The program uses all descriptors except the last hundred: odd numbers for a file, even numbers for a pipe.
REUSING = """
import resource
from small import *
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
soft = min(hard, 4096) if hard > 0 else 4096
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
trainer = Trainer()
def take(place):
    if (trainer.number, place) != (2, sys.argv[1]):
        return
    os.closerange(3, soft)
    global own, ends
    own, ends = os.open("own", os.O_RDWR | os.O_CREAT), os.pipe()
    os.write(own, b"mine")
    os.set_blocking(ends[0], False)
    for number in range(6, soft - 100):
        os.dup2(own if number % 2 else ends[1], number)
def look():
    kinds = [(os.fstat(number).st_mode, os.get_inheritable(number)) for number in range(3, soft - 100)]
    try:
        print(os.read(ends[0], 100))
    except BlockingIOError:
        print("nothing")
    print(sorted(set(kinds)), os.lseek(own, 0, os.SEEK_CUR), os.fstat(own).st_size)
trainer.fit(4, take)
look()
"""


def as_without(place: Place, code: str, *arguments: str) -> Ended:
    """Run a program without autoprof and with it, assert that the output is the same, and return the second result."""
    without = place.ended(code, *arguments, AUTOPROF="0")
    (place.folder / "own").unlink(missing_ok=True)
    ended = place.ended(code, *arguments)
    assert (ended.status, ended.stdout, ended.stderr) == (without.status, without.stdout, without.stderr)
    assert ended.stdout
    return ended


@pytest.mark.fault("a program closes all descriptors from 3 on", "continues, and is recorded", "nothing")
@pytest.mark.parametrize("at", ["in update", "after the step"])
@pytest.mark.parametrize("code", [CLOSING, REUSING], ids=["closed", "reused"])
def test_autoprof_does_not_write_to_descriptors_of_the_program_and_still_records(
    place: Place, code: str, at: str
) -> None:
    as_without(place, code, at)
    if code is REUSING:
        assert (place.folder / "own").read_text() == "mine"
    assert judged_runs.problems(place.run) == []
    recorded = {step: judged_runs.names(place.run, step) for step in judged_runs.steps(place.run)}
    assert recorded == dict.fromkeys((1, 2, 3, 4), WHOLE_STEP)


# The handler is registered before autoprof's handlers, so Python calls it after them.
AT_EXIT = """
import atexit, os, sys

def take():
    os.closerange(3, 1025)
    own = os.open("own", os.O_RDWR | os.O_CREAT)
    os.write(own, b"mine")
    for number in range(own + 1, 1025):
        os.dup2(own, number)

atexit.register(take)
from small import *
Trainer().fit(1)
print("done")
sys.exit(65)
"""


def test_autoprof_does_not_write_to_descriptors_that_the_program_took_at_exit(place: Place) -> None:
    as_without(place, AT_EXIT)
    assert (place.folder / "own").read_text() == "mine"


INHERITED = """
from small import *
trainer = Trainer()
def look(place):
    if place == "in update":
        print(os.open(os.devnull, os.O_RDONLY), flush=True)
        subprocess.run(["ls", "/proc/self/fd"], close_fds=False)
trainer.fit(2, look)
"""


def test_a_program_and_its_children_get_the_same_descriptors_as_without_autoprof(place: Place) -> None:
    as_without(place, INHERITED)


# Code of a forked child -> True if it ends through Python's own exit. At the fork, the parent has unwritten lines of
# ended samples, because another sample is open.
FORKS = {
    "os._exit(0)": False,
    "sys.exit()": True,
    "raise SystemExit(3)": True,
    "Trainer().sample('of a child'); os._exit(0)": False,
    "Trainer().sample('of a child'); sys.exit()": True,
    "Trainer().evaluate(nothing); Trainer().sample('of a child'); sys.exit()": True,
}
FORKED = f"""
import json, multiprocessing
from small import *
trainer = Trainer()
children = {{}}
def run(code):
    exec(code)
def fork():
    for code in {list(FORKS)!r}:
        if (pid := os.fork()) == 0:
            run(code)
        os.waitpid(pid, 0)
        children[pid] = code
    child = multiprocessing.get_context("fork").Process(target=trainer.sample, args=("of a child",))
    child.start()
    child.join()
    children[child.pid] = "multiprocessing"
def in_the_middle():
    for name in "abc":
        trainer.sample(name)
    fork()
    trainer.sample("d")
def at(place):
    if (trainer.number, place) == (2, "in update"):
        trainer.sample("long", in_the_middle)
    if (trainer.number, place) == (2, "after the step"):
        if (pid := os.fork()) == 0:
            Trainer(10).fit(2)
            sys.exit()
        os.waitpid(pid, 0)
        children[pid] = "trains"
trainer.fit(3, at)
print(json.dumps([os.getpid(), children]))
"""


class Forked:
    """Run with forked children.

    Attributes:
        parent: Pid of the parent.
        children: Code of each child, by pid.
    """

    def __init__(self, folder: Path) -> None:
        place = Place(folder)
        ended = place.ended(FORKED)
        assert (ended.status, ended.said) == (0, [])
        self.run = place.run
        self.parent, children = json.loads(ended.stdout)
        self.children: dict[int, str] = {int(pid): code for pid, code in children.items()}


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Forked:
    return Forked(tmp_path_factory.mktemp("forked"))


def test_a_forked_child_writes_no_line_of_its_parent_and_the_parent_writes_each_once(forked: Forked) -> None:
    shown = judged_runs.spans(forked.run, 2)
    assert sorted(span.name for span in shown if span.pid == forked.parent) == sorted([*"abcd", "long", *WHOLE_STEP])
    assert {span.name for span in shown if span.pid != forked.parent} == {"of a child", "evaluate"}
    assert max(Counter(shown).values()) == 1
    assert judged_runs.problems(forked.run) == []


def test_a_forked_child_that_exits_has_all_its_spans_in_its_own_file(forked: Forked) -> None:
    shown = judged_runs.spans(forked.run, 2)
    for pid, code in forked.children.items():
        if FORKS.get(code):
            did = ["evaluate"] * ("evaluate" in code) + ["of a child"] * ("sample" in code)
            assert sorted(span.name for span in shown if span.pid == pid) == did
    files = {span.pid: span.file for span in shown}
    assert len(set(files.values())) == len(files) > 2


def test_a_forked_child_that_trains_has_its_steps(forked: Forked) -> None:
    (trains,) = [pid for pid, code in forked.children.items() if code == "trains"]
    assert judged_runs.steps(forked.run) == [1, 2, 3, 11, 12]
    for step, pid in ((3, forked.parent), (11, trains), (12, trains)):
        assert judged_runs.names(forked.run, step) == WHOLE_STEP
        assert {span.pid for span in judged_runs.spans(forked.run, step)} == {pid}
