"""Descriptors of autoprof's files."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprof.base import files

# Code for a separate process without standard streams.
CLOSED = """
import json, os, resource, sys
from autoprof.base import files, interpreter
for number in (0, 1, 2): os.close(number)
found = {}
def note(name, number):
    found[name] = number
    os.close(number)
CODE
with open("found.json", "w", opener=lambda path, flags: files.high(os.open(path, flags))) as file:
    json.dump(found, file)
"""


@pytest.fixture
def numbers(tmp_path: Path, python: Callable[..., object]) -> Callable[[str], dict[str, int]]:
    """Run code in a process without standard streams. Return the descriptors that it notes."""

    def run(code: str) -> dict[str, int]:
        python(CLOSED.replace("CODE", code))
        return json.loads((tmp_path / "found.json").read_text())

    return run


def test_no_file_takes_the_place_of_a_closed_standard_stream(numbers: Callable[[str], dict[str, int]]) -> None:
    found = numbers("""
note("create", files.create("one"))
note("opened", files.opened("one"))
note("descriptor", files.descriptor("/", os.O_RDONLY))
with interpreter.job_file({}) as file: found["job"] = file.fileno()
found["of_the_program"] = os.open(os.devnull, os.O_RDONLY)
""")
    assert found.pop("of_the_program") == 0
    assert min(found.values()) >= 3


def test_a_file_that_stays_open_has_a_high_number(numbers: Callable[[str], dict[str, int]]) -> None:
    found = numbers("""
for _ in range(3): os.open(os.devnull, os.O_RDONLY)
note("short", files.create("one"))
note("held", files.create("one", held=True))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
note("limited", files.create("one", held=True))
""")
    assert found["short"] < 700 <= found["held"]
    assert found["limited"] >= 32


def test_a_file_without_a_free_high_number_is_refused_and_takes_no_low_one(
    numbers: Callable[[str], dict[str, int]],
) -> None:
    found = numbers("""
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
taken = [files.high(os.open(os.devnull, os.O_RDONLY)) for _ in range(3)]
for number in range(3, 16): os.dup2(taken[0], number)
for number in (0, 1, 2): os.close(number)
try:
    files.create("one")
except OSError as error:
    found["error"] = error.errno
found["lowest"] = os.open(os.devnull, os.O_RDONLY)
for number in range(3, 16): os.close(number)
""")
    assert found == {"error": 24, "lowest": 0}


# Files may have at most 10 bytes, and SIGXFSZ ends the process.
LIMITED = """
import os, resource, signal
from autoprof.base import files, log, seam
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
def tried(work, *arguments):
    try:
        return work(*arguments)
    except OSError as error:
        return error.errno
"""


def test_a_file_over_the_size_limit_is_refused_whole(python: Callable[..., Any], tmp_path: Path) -> None:
    code = """
files.append("appended", b"12345678")
print(tried(files.append, "appended", b"123"), tried(files.write, "written", b"12345678901"))
"""
    assert python(LIMITED + code).stdout.split() == ["27", "27"]
    assert [path.name for path in tmp_path.iterdir()] == ["appended"]
    assert (tmp_path / "appended").read_text() == "12345678"


@pytest.mark.parametrize("pending", [True, False])
def test_a_write_over_the_size_limit_ends_no_process_and_leaves_its_signals(
    python: Callable[..., Any], pending: bool
) -> None:
    code = f"""
if {pending}:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGXFSZ])
    os.kill(os.getpid(), signal.SIGXFSZ)
before = signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.sigpending()
file = files.create("file")
def write():
    print(tried(os.write, file, b"12345678901"), tried(os.write, file, b"1"))
seam.no_size_signal(write)
print((signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.sigpending()) == before)
"""
    assert python(LIMITED + code).stdout.split() == ["10", "27", "True"]


def test_a_signal_that_the_program_blocks_meanwhile_stays_blocked(python: Callable[..., Any]) -> None:
    code = """
seam.no_size_signal(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGUSR1])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []) == {signal.SIGUSR1})
"""
    assert python(LIMITED + code).stdout.split() == ["True"]


def test_a_signal_handler_that_raises_leaves_the_mask_of_signals(python: Callable[..., Any]) -> None:
    code = """
# Python calls handlers of signals at the end of this function.
real, calls = seam._signal.pthread_sigmask, []
def pthread_sigmask(*given):
    calls.append(given)
    if len(calls) == 2:
        real(*given)
        raise TimeoutError
    return real(*given)
seam._signal.pthread_sigmask = pthread_sigmask
try:
    seam.no_size_signal(int)
except TimeoutError:
    print("raised")
print(len(calls), real(signal.SIG_BLOCK, []))
"""
    assert python(LIMITED + code).stdout.split() == ["raised", "4", "set()"]


def test_an_error_names_the_file_and_not_its_part(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path, number in ((tmp_path / "absent" / "page.html", errno.ENOENT), (tmp_path / "folder", errno.EISDIR)):
        with pytest.raises(OSError, match=re.escape(f"[Errno {number}] {os.strerror(number)}: {str(path)!r}") + "$"):
            files.write(path, b"")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_line_of_the_log_for_a_file_over_the_size_limit_is_left_out(python: Callable[..., Any]) -> None:
    code = """
os.dup2(files.create("log"), 2)
log.configure("warning")
for _ in range(3):
    log.warning("longer than it may be")
print(os.path.getsize("log"))
"""
    assert python(LIMITED + code).stdout == "10\n"
