"""Crash files: their processes, and programs that handle crashes themselves."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from autoprof.base import identity
from tests.support import helpers
from tests.support.small_trainer import plain

# Start of each program, which uses the crash file of `autoprof.run.watcher`.
BEGIN = """
import ctypes, faulthandler, json, os, signal, sys
from pathlib import Path
from autoprof.base import process
from autoprof.run.watcher import _state, begin_crash_file as begin, check_crash_file as check
from autoprof.rundir.layout import RunDir

run, end = RunDir(Path("run")), _state.end_crash_file
def held():
    return [os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd") if int(each) > 100]
def say(**what):
    print(json.dumps(what), flush=True)
def kill():
    os.kill(os.getpid(), signal.SIGTERM)
"""
# Start of a program that handles SIGTERM, so that the crash file is only for crashes.
HANDLED = "signal.signal(signal.SIGTERM, lambda *_: None)\n"


def ran(folder: Path, code: str, *flags: str) -> tuple[int, list[dict], str]:
    """Run a program; return its status, its output and its stderr."""
    command = [sys.executable, *flags, "-c", BEGIN + code]
    done = helpers.run(command, cwd=folder)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def files(folder: Path) -> dict[str, bool]:
    """Return the existing crash files, each with True if it is not empty."""
    return {path.name: path.stat().st_size > 0 for path in folder.glob("run/crashes/*")}


def test_a_crash_leaves_its_stack_and_nothing_on_stderr(tmp_path: Path) -> None:
    status, (said,), stderr = ran(
        tmp_path, "begin(run)\nsay(pid=os.getpid(), on=faulthandler.is_enabled(), held=held())\nos.abort()"
    )
    assert (status, stderr, said["on"]) == (-signal.SIGABRT, "", True)
    assert files(tmp_path) == {f"{identity.HOST}-{said['pid']}.txt": True}
    assert len(said["held"]) == 1


def test_at_the_end_nothing_is_left(tmp_path: Path) -> None:
    code = "begin(run)\nend()\n"
    code += "say(on=faulthandler.is_enabled(), held=held(), there=os.path.exists('run/crashes'))"
    assert ran(tmp_path, code) == (0, [{"on": False, "held": [], "there": False}], "")


@pytest.mark.parametrize(
    ("before", "flags"),
    [
        ("faulthandler.enable()", []),
        ("", ["-X", "faulthandler"]),
        ("signal.signal(signal.SIGABRT, lambda *_: None)", []),
        ("signal.signal(signal.SIGFPE, signal.SIG_IGN)", []),
        # A handler installed by a C library.
        ("libc = ctypes.CDLL(None); libc.signal(signal.SIGBUS, libc.abort)", []),
    ],
)
def test_a_program_that_sees_to_crashes_itself_is_left_alone(tmp_path: Path, before: str, flags: list[str]) -> None:
    code = f"{HANDLED}{before}\nbefore = faulthandler.is_enabled()\nbegin(run)\n"
    code += "say(same=before == faulthandler.is_enabled(), held=held())"
    assert ran(tmp_path, code, *flags) == (0, [{"same": True, "held": []}], "")
    assert files(tmp_path) == {}


@pytest.mark.parametrize("does", ["faulthandler.enable()", "faulthandler.disable(); faulthandler.enable()"])
def test_a_program_that_enables_its_own_afterwards_has_it(tmp_path: Path, does: str) -> None:
    status, said, stderr = ran(tmp_path, f"{HANDLED}begin(run)\n{does}\nsay(held=held())\ncheck()\nos.abort()")
    assert (status, said) == (-signal.SIGABRT, [{"held": []}])
    assert "Fatal Python error: Aborted" in stderr
    assert list(files(tmp_path).values()) == [False]


def test_what_a_program_has_enabled_afterwards_stays_enabled_at_the_end(tmp_path: Path) -> None:
    code = "begin(run)\nfaulthandler.enable()\nend()\nsay(on=faulthandler.is_enabled())"
    assert ran(tmp_path, code) == (0, [{"on": True}], "")
    assert files(tmp_path) == {}


def test_a_forked_child_has_a_file_of_its_own_or_none(tmp_path: Path) -> None:
    code = """
begin(run)
for begins in (False, True):
    if os.fork() == 0:
        say(on=faulthandler.is_enabled(), held=len(held()))
        if begins:
            begin(run)
        os.abort()
    os.wait()
say(pid=os.getpid(), on=faulthandler.is_enabled(), held=len(held()))
end()
"""
    status, (first, second, parent), stderr = ran(tmp_path, code)
    assert (status, stderr) == (0, "")
    assert first == second == {"on": False, "held": 0}
    assert (parent["on"], parent["held"]) == (True, 1)
    assert list(files(tmp_path).values()) == [True]


def test_a_started_program_does_not_have_the_descriptor(tmp_path: Path) -> None:
    code = "import subprocess\nbegin(run)\n"
    code += "subprocess.run(['sh', '-c', 'ls /proc/self/fd | wc -l'], close_fds=False)"
    assert ran(tmp_path, code)[1] == [4]


def test_a_descriptor_that_is_another_files_gets_nothing(tmp_path: Path) -> None:
    code = """
begin(run)
os.closerange(3, 4096)
others = [open("other.txt", "w") for _ in range(900)]
check()
say(on=faulthandler.is_enabled())
for other in others:
    other.close()
os.abort()
"""
    status, said, _ = ran(tmp_path, code)
    assert (status, said) == (-signal.SIGABRT, [{"on": False}])
    assert (tmp_path / "other.txt").read_text() == ""


def test_a_limit_of_file_sizes_set_later_changes_no_signal_of_a_crash(tmp_path: Path) -> None:
    code = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
begin(run)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
check()
say(on=faulthandler.is_enabled())
os.abort()
"""
    assert ran(tmp_path, code) == (-signal.SIGABRT, [{"on": False}], "")


def test_the_descriptor_takes_no_low_number_also_where_few_are_allowed(tmp_path: Path) -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
begin(run)
say(on=faulthandler.is_enabled(), next=os.open("/dev/null", os.O_RDONLY))
"""
    assert ran(tmp_path, code) == (0, [{"on": True, "next": 3}], "")


def test_a_program_that_looks_after_its_imports_enables_faulthandler_itself(tmp_path: Path) -> None:
    code = "import faulthandler\nfrom small import Trainer\nprint(faulthandler.is_enabled())\nTrainer().fit()\n"
    assert plain(tmp_path, f"{code}print(faulthandler.is_enabled())\n").stdout == "False\nTrue\n"


@pytest.mark.parametrize("before", ["", "faulthandler.enable()\n"])
def test_a_process_that_sigterm_kills_writes_the_stack_of_its_main_thread(tmp_path: Path, before: str) -> None:
    code = f"{before}begin(run)\nsay(handler=signal.getsignal(signal.SIGTERM))\nkill()"
    assert ran(tmp_path, code) == (-signal.SIGTERM, [{"handler": 0}], "")
    (dump,) = tmp_path.glob("run/crashes/*")
    assert dump.read_text().startswith("Stack (most recent call first):\n  File")


@pytest.mark.parametrize(
    "handler",
    [
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(7))",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "libc = ctypes.CDLL(None); libc.signal(signal.SIGTERM, ctypes.cast(libc._exit, ctypes.c_void_p))",
        "faulthandler.register(signal.SIGTERM, sys.stderr)",
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_the_own_handler_of_a_program_stays(tmp_path: Path, handler: str, before: bool) -> None:
    first, last = (handler, "begin(run)") if before else ("begin(run)", handler)
    code = f"{first}\n{last}\ncheck()\nif os.fork() == 0:\n    kill()\n    os._exit(7)\nkilled = os.wait()[1]\n"
    status, said, _ = ran(tmp_path, f"{code}say(killed=killed)\nend()\nkill()\nos._exit(7)")
    own = signal.SIGTERM if "libc" in handler else 7
    assert (status, said) == (own, [{"killed": own << 8}])
    assert not any(files(tmp_path).values())


def test_a_killed_child_writes_no_stack_into_the_file_of_its_parent(tmp_path: Path) -> None:
    code = """
begin(run)
for begins in (False, True):
    if os.fork() == 0:
        if begins:
            begin(run)
        kill()
    say(status=os.wait()[1])
say(pid=os.getpid())
kill()
"""
    status, said, _ = ran(tmp_path, code)
    assert (status, said[:2]) == (-signal.SIGTERM, [{"status": signal.SIGTERM}] * 2)
    found = files(tmp_path)
    assert len(found) == 2
    assert found[f"{identity.HOST}-{said[2]['pid']}.txt"]


def test_a_kill_writes_nothing_into_another_file(tmp_path: Path) -> None:
    code = """
begin(run)
os.closerange(3, 4096)
others = [open("other.txt", "w") for _ in range(900)]
check()
kill()
"""
    assert ran(tmp_path, code) == (-signal.SIGTERM, [], "")
    assert (tmp_path / "other.txt").read_text() == ""
