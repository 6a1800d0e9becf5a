"""Turns of the processes that finish captures: locks that only their user can hold."""

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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from autoprof.capture.finisher import turn

OLD_LOCK, LOCK = f"autoprof-{os.getuid()}-finish0.lock", "autoprof-finish0.lock"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mocker: Any) -> Path:
    """The temporary folder of this host, which has one turn."""
    place = tmp_path / "tmp"
    place.mkdir()
    mocker.patch("os.cpu_count", return_value=2)
    mocker.patch.object(tempfile, "gettempdir", return_value=str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return place


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A recording that waits to be finished, and was made long ago."""
    path = tmp_path / "x.pt.trace.json.part"
    path.write_text("{}")
    os.utime(path, (0, 0))
    return path


@contextmanager
def held(lock: Path) -> Iterator[None]:
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def waits(raw: Path) -> threading.Thread:
    waiting = threading.Thread(target=turn.wait, args=(str(raw),))
    waiting.start()
    waiting.join(0.5)
    return waiting


@pytest.mark.parametrize("own", [True, False], ids=["XDG_RUNTIME_DIR", "temporary folder"])
def test_one_process_compresses_at_a_time(
    raw: Path, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    folder = tmp_path / "runtime" if own else temporary / f"autoprof-{os.getuid()}"
    folder.mkdir(mode=0o700)
    if own:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with held(folder / LOCK):
        waiting = waits(raw)
        assert waiting.is_alive()
        assert raw.stat().st_mtime > 0
    waiting.join(10)
    assert not waiting.is_alive()


def test_the_folder_of_the_locks_is_its_users_alone(raw: Path, temporary: Path) -> None:
    turn.wait(str(raw))
    (folder,) = temporary.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.iterdir()] == [LOCK]


def test_a_lock_that_is_held_on_is_not_waited_for_without_end(raw: Path, temporary: Path, mocker: Any) -> None:
    mocker.patch.object(turn, "_PATIENCE_S", 0.3)
    with held(temporary / f"autoprof-{os.getuid()}" / LOCK):
        turn.wait(str(raw))


@pytest.mark.fault("a stranger holds the lock of finishers", "goes on", "nothing; finishers don't take turns")
@pytest.mark.parametrize("planted", ["lock", "open folder", "foreign folder", "link"])
def test_a_stranger_holds_no_trace_back(raw: Path, tmp_path: Path, temporary: Path, planted: str) -> None:
    folder = temporary / f"autoprof-{os.getuid()}"
    lock = temporary / OLD_LOCK if planted == "lock" else folder / LOCK
    if planted == "link":
        (tmp_path / "theirs").mkdir()
        folder.symlink_to(tmp_path / "theirs")
    elif planted != "lock":
        folder.mkdir()
        folder.chmod(0o777 if planted == "open folder" else 0o755)
    if planted == "foreign folder":
        if os.getuid():
            pytest.skip("only root can give a folder away")
        os.chown(folder, 65534, 65534)
    job = {"raw": str(raw), "trace": str(tmp_path / "x.pt.trace.json.gz"), "meta": {}, "max_bytes": 9}
    job["meta_path"] = str(tmp_path / "x.meta.json")
    with held(lock):
        command = [sys.executable, "-E", "-s", "-S", "-m", "autoprof.capture.finisher"]
        subprocess.run(command, input=json.dumps(job), text=True, check=True, timeout=60)
        for _ in range(300):
            if not raw.exists():
                break
            time.sleep(0.1)
        assert json.loads(Path(job["meta_path"]).read_text())["bytes"]
