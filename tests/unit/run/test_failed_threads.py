"""Exceptions that end threads: snapshots name them, and the program's hooks for them stay as they are."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autoprof.run import snapshot
from tests.support.small_trainer import plain

PROGRAM = """
import sys, threading
earlier = threading.Thread(target=lambda: {}["earlier"], name="earlier")
hooks = threading.excepthook, threading.__excepthook__
from small import *
Trainer().fit(steps=2)
print(hooks == (threading.excepthook, threading.__excepthook__), hooks[0] is hooks[1])
def run(work, name):
    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join()
earlier.start()
earlier.join()
run(lambda: [][3], "default")
run(sys.exit, "exits")
threading.excepthook = lambda failed: print(failed.exc_type, failed.thread.name)
run(lambda: 1 / 0, "own")
def fails(failed): raise RuntimeError("in the hook")
threading.excepthook = fails
run(lambda: None.missing, "hook")
"""
# Children whose class notices each read of an attribute.
CHILDREN = """
import multiprocessing, os, sys, time
from small import *
Trainer().fit(steps=2)
class Child(multiprocessing.get_context("fork").Process):
    read = []
    pid = name = exitcode = property(lambda self: Child.read.append("property"))
    def __getattr__(self, name): Child.read.append(name)
    def __repr__(self): Child.read.append("repr")
reader, writer = os.pipe()
def ends_with(status):
    os.read(reader, 1)
    status and os._exit(status)
targets = [(time.sleep, 600), (ends_with, 3), (ends_with, 0)]
children = [Child(target=target, args=(value,), daemon=True) for target, value in targets]
for child in children:
    child.start()
os.write(writer, b"gg")  # a child that ended earlier would be collected by the next start
for child in children[1:]:
    os.waitid(os.P_PID, child._popen.pid, os.WEXITED | os.WNOWAIT)
Child.read.clear()
alive, ended = sys.modules["autoprof.run.snapshot"].read_workers()
pids = [child._popen.pid for child in children]
print(Child.read, [(pids.index(each.pid), each.name) for each in alive], *ended)
print(os.waitpid(pids[1], 0)[1] >> 8)
os.kill(pids[0], 9)
"""
TELL = 'print(*sys.modules["autoprof.run.snapshot"]._failed_threads.texts, sep="\\n")\n'


def outputs(folder: Path, code: str, on: str) -> tuple[list[str], str]:
    """Return the lines on stdout, and stderr."""
    result = plain(folder, code, check=True, AUTOPROF=on, AUTOPROF_LOG="error")
    return result.stdout.splitlines(), result.stderr


def test_the_hooks_and_the_messages_of_the_program_stay_the_same(tmp_path: Path) -> None:
    off = outputs(tmp_path, PROGRAM, "0")
    assert outputs(tmp_path, PROGRAM, "1") == off
    assert off[0][0] == "True True"


def test_every_failed_thread_is_named_with_its_exception(tmp_path: Path) -> None:
    said = outputs(tmp_path, PROGRAM + TELL, "1")[0][-4:]
    assert [line.partition(" in train.py")[0] for line in said] == [
        "thread earlier ended with KeyError: 'earlier'",
        "thread default ended with IndexError: list index out of range",
        "thread own ended with ZeroDivisionError: division by zero",
        "thread hook ended with AttributeError: 'NoneType' object has no attribute 'missing'",
    ]


def test_a_worker_process_without_a_name_is_named_by_its_title(mocker: Any) -> None:
    popen = SimpleNamespace(pid=os.getppid())
    child = SimpleNamespace(_name="SpawnProcess-2", _parent_pid=os.getpid(), _popen=popen)
    mocker.patch("multiprocessing.process._children", [child])
    mocker.patch("autoprof.rundir.processes.title_of", return_value="sglang::scheduler")
    assert [each.name for each in snapshot.read_workers()[0]] == ["process sglang::scheduler"]


def test_worker_processes_are_named_without_a_call_of_their_class(tmp_path: Path) -> None:
    said = outputs(tmp_path, CHILDREN, "1")[0][-2:]
    assert said[0].startswith("[] [(0, 'process Child-1')] process Child-2 (pid ")
    assert said[0].endswith(") exited with status 3")
    assert said[1] == "3"
