"""Turns of finisher processes: locks that only their user can hold."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from autoprof.capture import finisher

LOCK = f"autoprof-{os.getuid()}-finish0.lock"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mocker: Any) -> Path:
    """Return the temporary folder of a host on which one finisher works at a time."""
    place = tmp_path / "tmp"
    place.mkdir()
    mocker.patch("os.cpu_count", return_value=2)
    mocker.patch.object(tempfile, "gettempdir", return_value=str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    return place


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Return an old recording that waits to be finished."""
    path = tmp_path / "x.pt.trace.json.part"
    path.write_text("{}")
    os.utime(path, (0, 0))
    return path


@contextmanager
def held(lock: Path, mode: int = 0o600) -> Iterator[None]:
    with lock.open("w") as file:
        lock.chmod(mode)
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def waits(raw: Path) -> threading.Thread:
    waiting = threading.Thread(target=finisher.wait_for_turn, args=(str(raw),))
    waiting.start()
    waiting.join(0.5)
    return waiting


def test_one_process_compresses_at_a_time(raw: Path, temporary: Path) -> None:
    with held(temporary / LOCK):
        waiting = waits(raw)
        assert waiting.is_alive()
        assert raw.stat().st_mtime > 0
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_turn_lasts_until_its_end_and_leaves_no_file(raw: Path, temporary: Path) -> None:
    turn = finisher.wait_for_turn(str(raw))
    assert turn is not None
    assert [(path.name, path.stat().st_mode & 0o777) for path in temporary.iterdir()] == [(LOCK, 0o600)]
    assert finisher._lock_file(turn[1]) is None
    finisher.end_turn(*turn)
    assert list(temporary.iterdir()) == []
    again = finisher.wait_for_turn(str(raw))
    assert again is not None
    finisher.end_turn(*again)


def test_a_lock_whose_file_was_removed_meanwhile_is_no_lock(temporary: Path, mocker: Any) -> None:
    def lock(descriptor: int, operation: int) -> None:
        (temporary / LOCK).unlink()

    mocker.patch.object(finisher.fcntl, "flock", side_effect=lock)
    assert finisher._lock_file(str(temporary / LOCK)) is None


def test_a_lock_that_is_held_on_is_not_waited_for_without_end(raw: Path, temporary: Path, mocker: Any) -> None:
    mocker.patch.object(finisher, "_PATIENCE_S", 0.3)
    with held(temporary / LOCK):
        assert finisher.wait_for_turn(str(raw)) is None


@pytest.mark.fault("a stranger holds the lock of finishers", "goes on", "nothing; finishers don't take turns")
@pytest.mark.parametrize("planted", ["open file", "foreign file", "link", "folder"])
def test_a_stranger_holds_no_trace_back(raw: Path, tmp_path: Path, temporary: Path, planted: str) -> None:
    lock = temporary / LOCK
    if planted == "link":
        (tmp_path / "theirs").touch()
        lock.symlink_to(tmp_path / "theirs")
    elif planted == "folder":
        lock.mkdir()
    elif planted == "foreign file":
        if os.getuid():
            pytest.skip("only root can give a file away")
        lock.touch()
        os.chown(lock, 65534, 65534)
    job = {"raw": str(raw), "trace": str(tmp_path / "x.pt.trace.json.gz"), "meta": {}, "max_bytes": 9}
    job["meta_path"] = str(tmp_path / "x.meta.json")
    with nullcontext() if planted == "folder" else held(lock, 0o644 if planted == "open file" else 0o600):
        command = [sys.executable, "-E", "-s", "-S", "-m", "autoprof.capture.finisher"]
        subprocess.run(command, input=json.dumps(job), text=True, check=True, timeout=60)
        for _ in range(300):
            if not raw.exists():
                break
            time.sleep(0.1)
        assert json.loads(Path(job["meta_path"]).read_text())["bytes"]
