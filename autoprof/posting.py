"""Small things that processes of a run leave for the one that drives its steps, each in one entry, written in its place
anew: in Ray's key-value store, or in the run's `told/` where a launcher such as torchrun has started the ranks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

import msgspec

from autoprof import _files, interrupts, runtime, store
from autoprof.runtime import Runtime

# The folder, and how keys of the store begin.
TOLD = "told"
# An entry is some hundred bytes.
_MOST_BYTES = 1 << 20

_stop = threading.Event()


class Post:
    """Sends entries in a thread, which ends when there is nothing left to send."""

    def __init__(self, run: Runtime) -> None:
        self._run = run
        self._waiting: dict[str, tuple[float, Callable[[], msgspec.Struct]]] = {}
        self._lock = threading.Lock()
        self._going = False

    def send(self, name: str, make: Callable[[], msgspec.Struct], at: float = 0.0) -> None:
        """Send what `make` gives then, not before `at` (`time.monotonic`). What waits under the name is not sent."""
        with self._lock:
            self._waiting[name] = at, make
            if self._going:
                return
            self._going = True
        try:
            threading.Thread(target=self._work, name="autoprof-posting", daemon=True).start()
        except RuntimeError as error:  # there may be no more threads
            interrupts.pass_on(error)
            self._going = False

    def _work(self) -> None:
        while True:
            with self._lock:
                name = min(self._waiting, key=lambda each: self._waiting[each][0], default="")
                at, make = self._waiting.pop(name, (0.0, None))
                if make is None or _stop.is_set():
                    self._going = False
                    return
            if _stop.wait(max(0.0, at - time.monotonic())):
                continue
            try:
                _put(self._run, name, msgspec.json.encode(make()))
            except Exception as error:
                interrupts.pass_on(error)
                if not _stop.is_set():
                    runtime.report("posting", error)


def read(run: Runtime, prefix: str) -> list[bytes]:
    """The entries whose names begin so.

    Raises:
        Exception: The store, or the folder, can't be read.
    """
    if store.up():
        return list(store.entries(f"{TOLD}/{run.info.id}/{prefix}").values())
    found = []
    for path in sorted((run.rundir.path / TOLD).glob(f"{prefix}*.json")) if ranks() > 1 else ():
        with contextlib.suppress(FileNotFoundError):
            found.append(_files.read(path, _MOST_BYTES))
    return found


def ranks() -> int:
    """How many ranks a launcher such as torchrun has started, each with the trainer in it."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def stop() -> None:
    """Ray is about to end: nothing more is sent."""
    _stop.set()


def resume() -> None:
    """Ray is up again."""
    _stop.clear()


def _put(run: Runtime, name: str, content: bytes) -> None:
    if not store.put(f"{TOLD}/{run.info.id}/{name}", content) and ranks() > 1:
        folder = run.rundir.make(run.rundir.path / TOLD)
        _files.write(folder / f"{name}.json", content)
