"""Per-process statistics for the driver, one entry each, overwritten in place.

They go to Ray's key-value store, or to the run's `told/` where a launcher such as torchrun has started the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

import msgspec

from autoprof.base import files, identity, interrupts, process, threads
from autoprof.base.originals import os, threading, time
from autoprof.run import runtime
from autoprof.run.cluster import kv
from autoprof.run.runtime import Runtime

# The folder, and the beginning of keys in the store.
TOLD = "told"
# An entry is some hundred bytes.
_MOST_BYTES = 1 << 20


class _State(process.State):
    """The end of sending, when Ray is about to end, and the senders, whose threads a forked child does not have."""

    def begin(self) -> None:
        self.stop = threading.Event()
        self.all: WeakSet[StatsChannel] = WeakSet()

    def in_child(self) -> None:
        for channel in list(self.all):
            channel.begin()


_state = _State()


class StatsChannel:
    """Sender of entries, in a thread that ends when there is nothing left to send."""

    def __init__(self, run: Runtime) -> None:
        self._run = run
        self.begin()
        _state.all.add(self)

    def begin(self) -> None:
        """Begin with nothing to send, in a new process or a forked child."""
        self._waiting: dict[str, tuple[float, Callable[[], msgspec.Struct]]] = {}
        self._lock = threading.Lock()
        self._going = False

    def send(self, name: str, make: Callable[[], msgspec.Struct], at: float = 0.0) -> None:
        """Send what `make` gives then, not before `at` (`time.monotonic`), in place of what waits under the name."""
        with self._lock:
            self._waiting[name] = at, make
            if self._going:
                return
            self._going = True
        try:
            threads.start(threading.Thread(target=self._work, name="autoprof-posting", daemon=True).start)
        except RuntimeError as error:  # there may be no more threads
            interrupts.pass_on(error)
            self._going = False

    def _work(self) -> None:
        while True:
            with self._lock:
                name = min(self._waiting, key=lambda each: self._waiting[each][0], default="")
                at, make = self._waiting.pop(name, (0.0, None))
                if make is None or _state.stop.is_set():
                    self._going = False
                    return
            if _state.stop.wait(max(0.0, at - time.monotonic())):
                continue
            try:
                _put(self._run, name, msgspec.json.encode(make()))
            except Exception as error:
                interrupts.pass_on(error)
                if not _state.stop.is_set():
                    runtime.report("posting", error)


def read(run: Runtime, prefix: str) -> list[bytes]:
    """Return the entries whose names begin with `prefix`.

    Raises:
        Exception: The store, or the folder, can't be read.
    """
    if kv.up():
        return list(kv.entries(f"{TOLD}/{run.info.id}/{prefix}").values())
    if identity.ranks() == 1:
        return []
    found, folder = [], os.path.join(run.rundir.path, TOLD)
    # Not `Path.glob`: that of Python 3.13 catches every `OSError`, also one that a signal handler raises.
    with interrupts.suppress(FileNotFoundError):
        for name in sorted(os.listdir(folder)):
            if name.startswith(prefix) and name.endswith(".json"):
                with interrupts.suppress(FileNotFoundError):
                    found.append(files.read(os.path.join(folder, name), _MOST_BYTES))
    return found


def stop() -> None:
    """Send nothing more: Ray is about to end."""
    _state.stop.set()


def resume() -> None:
    """Send again: Ray is up again."""
    _state.stop.clear()


def _put(run: Runtime, name: str, content: bytes) -> None:
    if not kv.put(f"{TOLD}/{run.info.id}/{name}", content) and identity.ranks() > 1:
        folder = run.rundir.make(run.rundir.path / TOLD)
        files.write(folder / f"{name}.json", content)
