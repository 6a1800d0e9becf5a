"""Start of autoprof's threads: signal mask, stack size, and processes that they start."""

from __future__ import annotations

import _thread
import ast
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import autoprof
from autoprof.base import process
from autoprof.run import end

PACKAGE = Path(autoprof.__file__).parent
# The reader is not part of a run.
OUTSIDE = ("cli", "traces", "report")
_STARTS = re.compile(r"start_new_thread$|[tT]hread(\(.*\))?\.start$|pool\.(map|submit)$", re.DOTALL)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Restore the signal mask and the stack size after each test."""
    mask, size = signal.pthread_sigmask(signal.SIG_BLOCK, ()), threading.stack_size()
    yield
    assert (signal.pthread_sigmask(signal.SIG_SETMASK, mask), threading.stack_size(size)) == (mask, size)


def in_thread(work: Callable[[], Any]) -> Any:
    """Return the result of `work` in a thread that autoprof starts."""
    found: list[Any] = []
    done = threading.Event()
    process.start_thread(_thread.start_new_thread, lambda: (found.append(work()), done.set()), ())
    assert done.wait(20)
    return found[0]


def test_a_thread_blocks_all_signals_but_those_of_faults() -> None:
    blocked = in_thread(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    faults = {"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS"}
    never = {"SIGKILL", "SIGSTOP"}
    assert signal.valid_signals() - blocked == {signal.Signals[name] for name in faults | never}


def test_the_mask_of_the_starting_thread_is_restored() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    in_thread(int)
    assert signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2}) == {signal.SIGUSR2}


def test_the_mask_is_restored_after_a_start_that_fails() -> None:
    def fail() -> None:
        raise RuntimeError("can't start new thread")

    with pytest.raises(RuntimeError, match="can't start new thread"):
        process.start_thread(fail)


def test_a_signal_that_arrives_during_a_start_is_handled_after_it() -> None:
    said = []
    before = signal.signal(signal.SIGUSR1, lambda *_: said.append("handled"))
    try:
        process.start_thread(
            lambda: (signal.pthread_kill(threading.get_ident(), signal.SIGUSR1), said.append("started"))
        )
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert said == ["started", "handled"]


def test_the_mask_is_restored_when_a_signal_handler_raises_in_a_start() -> None:
    def handler(*_: object) -> None:
        raise KeyError("handler")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(KeyError, match="handler"):
            process.start_thread(signal.pthread_kill, threading.get_ident(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_thread_has_a_large_stack_where_the_program_wants_small_ones() -> None:
    threading.stack_size(32 << 10)
    try:
        assert in_thread(process.stack_bytes) >= 1 << 20  # glibc may give it a larger one that is free
        assert threading.stack_size() == 32 << 10
    finally:
        threading.stack_size(0)


def test_a_start_keeps_the_stack_size_of_the_program() -> None:
    for size in (0, 64 << 10, 64 << 20):
        threading.stack_size(size)
        in_thread(int)
        assert threading.stack_size() == size


def test_the_stack_size_of_each_thread_is_known(python: Any) -> None:
    code = """
import threading
from autoprof.base import process
from autoprof.run import end
for size in (32, 4096):
    threading.stack_size(size * 1024)
    thread = threading.Thread(target=lambda: print(process.stack_bytes() // 1024))
    thread.start()
    thread.join()
"""
    assert python(code).stdout.split() == ["32", "4096"]


def test_a_crash_in_a_thread_writes_its_stack(python: Any) -> None:
    code = """
import _thread, ctypes, faulthandler, time
from autoprof.base import process
from autoprof.run import end
faulthandler.enable()
def crash_here():
    ctypes.string_at(0)
process.start_thread(_thread.start_new_thread, crash_here, ())
time.sleep(60)
"""
    run = python(code, check=False)
    assert run.returncode == -signal.SIGSEGV
    assert "in crash_here" in run.stderr


@pytest.mark.parametrize("module", ["capture.finisher", "cli.after_run"])
def test_a_process_of_autoprofs_unblocks_signals(python: Any, module: str) -> None:
    code = f"""
import io, signal, sys
from autoprof.{module} import main
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
sys.stdin, sys.argv = io.StringIO("no job"), ["", ""]
try:
    main()
except ValueError:
    print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""
    assert python(code).stdout == "set()\n"


def test_the_users_command_has_no_signal_blocked(mocker: Any) -> None:
    # Some shells unblock all signals (dash), others none (bash), so the test does not ask the command.
    found = []
    popen = mocker.patch.object(end.subprocess, "Popen")
    popen.side_effect = lambda *_, **__: found.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    in_thread(lambda: end.run_command("true", ""))
    assert found == [set()]


def test_every_thread_of_a_run_is_started_by_this_module() -> None:
    alone = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] in OUTSIDE or path.name == "process.py":
            continue
        alone += [f"{path.relative_to(PACKAGE)}:{call.lineno}" for call in _starts(ast.parse(path.read_text()))]
    assert alone == []


def _starts(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield the calls that start a thread themselves."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and _STARTS.search(ast.unparse(call.func)):
            yield call
