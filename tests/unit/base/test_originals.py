"""Modules of the standard library that a program's patches do not reach."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import pytest

from autoprof.base import originals
from autoprof.capture import writer

PATCH = """
from unittest import mock
import _thread, builtins, fcntl, io, os, posixpath, shutil, subprocess, tempfile, threading, time

def patch(module, names):
    for name in names:
        setattr(module, name, mock.Mock(side_effect=AssertionError(name)))

def patch_os():
    functions = [name for name in os.__all__ if callable(getattr(os, name)) and not isinstance(getattr(os, name), type)]
    patch(os, [name for name in functions if name not in ("fspath", "fsencode", "fsdecode")])
    patch(posixpath, ("exists", "isdir", "isfile", "islink", "getsize", "realpath", "dirname"))

def patch_others():
    patch(builtins, ["open"])
    patch(io, ["open"])
    patch(fcntl, ["fcntl", "flock"])
    patch(subprocess, ["Popen"])
    patch(shutil, ["rmtree"])
    patch(time, ["sleep", "monotonic"])
    patch(threading, ["Event", "Condition", "Lock"])
"""
CALLS = """
os.makedirs("folder/below")
with io.open("folder/file", "w") as file:
    file.write(json.dumps([os.path.isdir("folder"), os.path.exists("file")]))
os.replace("folder/file", "folder/moved")
print([(folder, names) for folder, _, names in os.walk("folder")], io.open("folder/moved").read())
shutil.rmtree("folder")
print(subprocess.run(["echo", "started"], capture_output=True, text=True, timeout=20).stdout.strip())
with tempfile.TemporaryFile() as file:
    print(file.write(b"text"))
print(fcntl.fcntl(1, fcntl.F_GETFD))
event = threading.Event()
_thread.start_new_thread(event.set, ())
print(event.wait(20), os.path.exists("folder"))
"""
SAID = ["[('folder', ['moved']), ('folder/below', [])] [true, false]", "started", "4", "0", "True False"]


def test_patches_do_not_reach_the_copies(python: Any) -> None:
    names = "from autoprof.base.originals import fcntl, io, json, os, shutil, subprocess, tempfile, threading, time\n"
    code = f"{PATCH}from autoprof.base import originals\npatch_os()\npatch_others()\n{names}{CALLS}"
    assert python(code).stdout.splitlines() == SAID


def test_a_patch_of_os_that_is_older_does_not_reach_the_copy(python: Any) -> None:
    code = f"""{PATCH}
import json
with mock.patch("os.replace"), mock.patch("os.open"), mock.patch("os.path.exists"):
    from autoprof.base.originals import io, os, time
os.close(os.open("old", os.O_CREAT))
os.replace("old", "new")
print(os.path.exists("new"), os.path.exists("old"))
"""
    assert python(code).stdout == "True False\n"


# Modules that pyfakefs replaces wherever they were imported, and modules that a process with hooks loads.
HELD = """
import importlib, pkgutil, sys, types
import fcntl, io, os, shutil
import autoprof
rooms = ("base", "behaviours", "capture", "config", "hooks", "run", "rundir", "windows")
# They run in other processes.
elsewhere = ("autoprof.capture.finisher", "autoprof.run.node_functions")
for _, name, _ in pkgutil.walk_packages(autoprof.__path__, "autoprof."):
    if name.split(".")[1] in rooms and not name.startswith(elsewhere):
        module = importlib.import_module(name)
        for key, value in vars(module).items():
            if isinstance(value, types.ModuleType) and value in (fcntl, io, os, os.path, shutil):
                print(name, key)
"""


def test_code_in_a_program_holds_no_module_that_pyfakefs_replaces(python: Any) -> None:
    assert python(HELD).stdout == ""


def test_an_object_in_the_place_of_os_is_named(python: Any) -> None:
    code = """
import os, sys
class FakeOsModule:
    pass
sys.modules["os"] = FakeOsModule()
try:
    from autoprof.base import originals
except ImportError as error:
    print(error)
"""
    assert python(code).stdout == "os is a FakeOsModule now, not Python's module; import the trainer before that\n"


def test_the_copies_have_all_names_of_the_modules() -> None:
    for name in ("os", "time", "json", "threading", "atexit", "fcntl"):
        missing = set(dir(__import__(name))) - set(dir(getattr(originals, name)))
        assert missing == set(), name
    assert set(os.path.__all__) <= set(dir(originals.os.path))


def test_the_copies_share_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MADE", "1")
    assert originals.os.getenv("MADE") == originals.os.environ["MADE"] == "1"
    monkeypatch.setitem(originals.os.environ, "MADE", "2")
    assert os.environ["MADE"] == "2"
    assert os.popen("echo $MADE").read() == "2\n"


def test_a_mock_of_the_environment_does_not_receive_the_copys_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MADE", "1")
    with mock.patch("os.environ.get", side_effect=AssertionError):
        assert originals.os.environ.get("MADE") == originals.os.getenv("MADE") == "1"
    with mock.patch("os.environ", {}):
        assert originals.os.environ.get("MADE") == "1"


@pytest.mark.parametrize("other", [{"MADE": "1"}, mock.Mock()], ids=["dict", "mock"])
def test_another_object_in_the_place_of_the_environment_is_taken(other: Any) -> None:
    assert originals._make_environ_copy(other) is other


def test_no_copy_is_found_by_its_name() -> None:
    # freezegun and pyfakefs look for modules of these names, in the modules that are loaded.
    assert originals.os.__name__ != "os"
    assert originals.time.__name__ != "time"


def test_a_frozen_clock_does_not_hold_up_a_wait() -> None:
    with mock.patch.object(time, "monotonic", return_value=1.0):
        job = writer.Job(lambda: None, patience_s=0.1)
        assert not job.wait(0.05)
