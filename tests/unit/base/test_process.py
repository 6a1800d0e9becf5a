"""State of a process: forks, the order of its end, and the reset between tests."""

from __future__ import annotations

import ast
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import autoprof
from autoprof.base import files, log, process
from autoprof.hooks import registry
from autoprof.run import cluster
from autoprof.run.cluster import StepAnnouncement

PACKAGE = Path(autoprof.__file__).parent
# The code of an interpreter start imports nothing. Processes that merge traces or measure a command are in no run.
ALONE = ("_boot/__init__.py", "traces/merge.py", "cli/recipes_measure.py")

PARTS = """
import atexit
import os
from autoprof.base import process

class Part(process.State):
    def __init__(self, name, ends=process.RUN):
        self.name, self.ends = name, ends
        super().__init__()

    def at_exit(self):
        print(self.name)
"""


def test_parts_end_in_their_order_before_what_the_user_had_registered_by_then(python: Any) -> None:
    code = """
step, capture, files, run = (Part(name, getattr(process, name)) for name in ("STEP", "CAPTURE", "FILES", "RUN"))
run.register_at_exit()
atexit.register(print, "user's first")
capture.register_at_exit()
step.register_at_exit()
atexit.register(print, "user's second")
files.register_at_exit()
atexit.register(print, "user's third")
"""
    said = python(PARTS + code).stdout.splitlines()
    assert said == ["user's third", "STEP", "CAPTURE", "FILES", "user's second", "user's first", "RUN"]


def test_a_part_that_ends_first_twice_ends_once(python: Any) -> None:
    code = """
capture = Part("CAPTURE", process.CAPTURE)
capture.register_at_exit()
atexit.register(print, "user's")
capture.register_at_exit()
"""
    assert python(PARTS + code).stdout.splitlines() == ["CAPTURE", "user's"]


def test_a_fork_is_each_parts_whatever_another_raises(python: Any) -> None:
    # Python's own hook writes a traceback in pieces, so the lines of parent and child could mix.
    code = """
import sys
sys.unraisablehook = lambda raised: os.write(2, f"{raised.exc_value!r}\\n".encode())

class Forked(Part):
    def before_fork(self):
        print(self.name, "before", flush=True)

    def after_fork_in_parent(self):
        raise ValueError(self.name)

    def after_fork_in_child(self):
        print(self.name, "child", flush=True)
        raise ValueError(self.name)

Forked("a"), Forked("b")
if (child := os.fork()) == 0:
    os._exit(0)
os.waitpid(child, 0)
"""
    done = python(PARTS + code)
    assert done.stdout.splitlines() == ["b before", "a before", "a child", "b child"]
    assert sorted(done.stderr.splitlines()) == ["ValueError('a')"] * 2 + ["ValueError('b')"] * 2


def test_after_a_reset_nothing_is_known_of_what_was_before(caplog: pytest.LogCaptureFixture) -> None:
    closed = registry.gate("k")
    for _ in range(2):
        log.warning_once("said")
        files.open_to_group(True)
        cluster.announce_step("run", StepAnnouncement(step=1, captured=True))
        for _ in range(registry.FAILURES):
            registry.count_failure("k")
        assert closed
        process.reset()
        assert not closed
        assert registry.gate("k") is closed
        assert cluster.own_announcement() == (False, None)
        assert cluster.announced_step("run") is None
        assert not files._state.group
    assert caplog.messages == ["said", "said"]


@pytest.mark.parametrize("at", range(1, 30))
def test_an_interrupted_latch_can_be_set_again(at: int) -> None:
    latch, left = process.Latch(), at

    def raise_once(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise TimeoutError
        return raise_once

    sys.settrace(raise_once)
    try:
        latch.set()
    except TimeoutError:
        pass
    finally:
        sys.settrace(None)
    again = threading.Thread(target=latch.set, daemon=True)
    again.start()
    again.join(10)
    assert not again.is_alive()
    assert latch.wait(10)
    latch.clear()
    assert not latch.wait(0.0)


def test_a_latch_wakes_all_threads_that_wait() -> None:
    latch = process.Latch()
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(latch.wait(60))) for _ in range(4)]
    for thread in threads:
        thread.start()
    latch.set()
    for thread in threads:
        thread.join(60)
    assert answers == [True] * 4


def test_after_a_reset_nothing_ends_with_the_process(python: Any) -> None:
    assert python(f"{PARTS}Part('x').register_at_exit()\nprocess.reset()\nprint('end')").stdout == "end\n"


def test_no_module_has_state_of_another_kind() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if name not in ALONE else ():
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Global) or called in ("atexit.register", "os.register_at_fork"):
                found.append((name, ast.unparse(node)))
    assert {name for name, _ in found} == {"base/process.py"}, found
