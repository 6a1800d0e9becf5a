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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from autoprof.capture.finisher import job

OLD_LOCK, LOCK = f"autoprof-{os.getuid()}-finish0.lock", "autoprof-finish0.lock"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mocker: Any) -> Path:
    """Return the temporary folder of a host on which one finisher works at a time."""
    place = tmp_path / "tmp"
    place.mkdir()
    mocker.patch("os.cpu_count", return_value=2)
    mocker.patch.object(tempfile, "gettempdir", return_value=str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return place


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Return an old recording that waits to be finished."""
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
    waiting = threading.Thread(target=job.wait_for_turn, args=(str(raw),))
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
    end = job.wait_for_turn(str(raw))
    (folder,) = temporary.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.iterdir()] == [LOCK]
    end()
    assert list(temporary.iterdir()) == []


def test_a_folder_of_the_user_stays_without_the_locks(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    job.wait_for_turn(str(raw))()
    assert list(folder.iterdir()) == []


def test_the_folder_stays_while_another_process_has_a_lock_in_it(raw: Path, temporary: Path) -> None:
    end = job.wait_for_turn(str(raw))
    with held(temporary / f"autoprof-{os.getuid()}" / "autoprof-finish1.lock"):
        end()
        (folder,) = temporary.iterdir()
        assert [path.name for path in folder.iterdir()] == ["autoprof-finish1.lock"]


def test_a_lock_that_was_removed_is_not_taken(raw: Path, temporary: Path) -> None:
    first = job.wait_for_turn(str(raw))
    folder = job._private(str(temporary / f"autoprof-{os.getuid()}"))
    # This process has opened the file before its owner removes it.
    opened = os.open(LOCK, os.O_RDWR, dir_fd=folder)
    first()
    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    second = job.wait_for_turn(str(raw))
    assert job._taken(LOCK) is None
    second()
    os.close(opened)
    with pytest.raises(FileNotFoundError):  # the folder is gone, and is made again
        job._locked(LOCK, folder)
    job.wait_for_turn(str(raw))()
    os.close(folder)


RACE = """
import os, sys, time
from autoprof.capture.finisher import job
job.os.cpu_count = lambda: 1
job._PAUSE_S = 0.0001
while not os.path.exists("go"):
    time.sleep(0.001)
for _ in range(300):
    end = job.wait_for_turn("raw")
    os.close(os.open("alone", os.O_CREAT | os.O_EXCL))
    os.unlink("alone")
    end()
"""


def test_processes_that_remove_each_others_folder_take_turns(tmp_path: Path, temporary: Path) -> None:
    racing = [subprocess.Popen([sys.executable, "-c", RACE], cwd=tmp_path) for _ in range(3)]
    (tmp_path / "go").touch()
    assert [process.wait(60) for process in racing] == [0, 0, 0]
    assert list(temporary.iterdir()) == []


def test_a_lock_that_is_held_on_is_not_waited_for_without_end(raw: Path, temporary: Path, mocker: Any) -> None:
    mocker.patch.object(job, "_PATIENCE_S", 0.3)
    with held(temporary / f"autoprof-{os.getuid()}" / LOCK):
        job.wait_for_turn(str(raw))


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
