"""Deadlocks of two locks, and transfers that a thread awaits, by the source of the places where threads stand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from autoprof.report import places
from autoprof.rundir.records import Frame, Thread

OF_MODULE = """\
import threading
first, second = threading.Lock(), threading.Lock()

def one():
    with first:
        other()

def other():
    with second:
        pass

def two():
    with second:
        if True:
            with first:
                pass
"""
OF_OBJECT = """\
import threading

class Cache:
    def __init__(self):
        self.rows = threading.Lock()
        self.index = threading.Lock()

    def read(self):
        with self.rows:
            with self.index:
                pass

    def write(self):
        with self.index:
            with self.rows:
                pass
"""


def deadlock(path: Path, source: str, *lines: Sequence[int]) -> str:
    """Return the sentence for threads at these lines of a file, outermost function first."""
    path.write_text(source)
    threads = [
        Thread(name=f"scorer-{number}", ident=number, frames=[Frame(f"f{line}", str(path), line) for line in stack])
        for number, stack in enumerate(lines, 1)
    ]
    return places.deadlock(threads)


def test_two_threads_that_wait_for_one_anothers_locks_are_told_with_their_places(tmp_path: Path) -> None:
    assert deadlock(tmp_path / "score.py", OF_MODULE, [6, 9], [15]) == (
        "deadlock of two locks in {process}: scorer-1 waits for second in score.py:9 f9, "
        "and scorer-2 waits for first in score.py:15 f15"
    )


def test_a_thread_that_has_its_lock_waits_for_none(tmp_path: Path) -> None:
    assert deadlock(tmp_path / "score.py", OF_MODULE, [6, 9], [14]) == ""


def test_locks_of_an_object_are_likely_in_a_deadlock(tmp_path: Path) -> None:
    # Two objects have two locks of that name.
    assert deadlock(tmp_path / "cache.py", OF_OBJECT, [10], [15]) == (
        "likely deadlock of two locks in {process}: scorer-1 waits for index in cache.py:10 f10, "
        "and scorer-2 waits for rows in cache.py:15 f15"
    )


@pytest.mark.parametrize(
    ("source", "one", "other"),
    [
        (
            OF_MODULE.replace("def one():", "def one(second):").replace("def other():", "def other(second):"),
            [6, 9],
            [15],
        ),
        (OF_MODULE.replace("def other():", "def other():\n    second = threading.Lock()"), [6, 10], [16]),
        (OF_MODULE.replace("threading.Lock()", "threading.Semaphore(2)"), [6, 9], [15]),
        (OF_MODULE + "first = threading.Lock()\n", [6, 9], [15]),
        (OF_MODULE.replace("with second:\n        pass", "with second: pass"), [6, 9], [14]),
        ("this is no Python", [1], [1]),
    ],
    ids=["parameter", "local", "semaphore", "made twice", "body in the line", "damaged"],
)
def test_names_that_stand_for_several_locks_are_no_deadlock(
    tmp_path: Path, source: str, one: list[int], other: list[int]
) -> None:
    assert deadlock(tmp_path / "score.py", source, one, other) == ""


@pytest.mark.parametrize(
    ("source", "transfer"),
    [
        ("dist.irecv(data, src=1).wait()", "recv from rank 1"),
        ("work = dist.isend(data, peer + 1)\nwork.wait()", "send to rank peer + 1"),
        ("def f(data):\n    work = dist.irecv(data)\n    work.wait()", "recv"),
        ("work = dist.irecv(data, 1)\nif peer:\n    work = dist.irecv(data, 2)\nwork.wait()", "a send or recv"),
        ("for work in dist.batch_isend_irecv(ops):\n    work.wait()", "a send or recv"),
        ("work = dist.irecv(data, 1)\ndef f(work):\n    work.wait()", ""),
        ("lock = threading.Event()\nlock.wait()", ""),
    ],
)
def test_a_transfer_that_a_thread_awaits_has_the_rank_of_its_call(tmp_path: Path, source: str, transfer: str) -> None:
    (tmp_path / "train.py").write_text(source)
    frames = [Frame("f", str(tmp_path / "train.py"), len(source.splitlines()))]
    assert places.pending_transfer(frames) == transfer
