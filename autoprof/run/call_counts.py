"""Counts of the calls of each hook by step, which `autoprof recipes --try` asks for: `calls/<host>-<pid>.txt`.

Each count stands in the file as soon as it has changed: a process that is killed loses none. Other runs count none.
"""

from __future__ import annotations

import itertools

from autoprof.base import files, identity, interrupts, process
from autoprof.base.originals import json, os, threading
from autoprof.run import runtime, step_announcement
from autoprof.rundir.layout import RunDir

# Set by the command, for the processes that it starts.
VARIABLE = "AUTOPROF_TRY"
FOLDER = "calls"
_DIGITS = 15


class _State(process.State):
    """The file of this process, and where each count stands in it."""

    def begin(self) -> None:
        self.on = bool(os.environ.get(VARIABLE))
        self.forget()

    def in_child(self) -> None:
        if self.file >= 0:
            os.close(self.file)
        self.forget()

    def forget(self) -> None:
        """Begin a file of one's own with the next count."""
        # A signal handler may call a hooked function while a count is written.
        self.lock = threading.RLock()
        self.file = -1
        self.end = 0
        self.counts: dict[tuple[str, int | None, bool], list[int]] = {}


state = _State()


def add(key: str, fired: bool) -> None:
    """Count a call of the hook `key` in the step that this process knows. `fired`: the hook is for this call."""
    run = runtime.current()
    if run is None:
        return
    try:
        with state.lock:
            which = key, step_announcement.known(), fired
            entry = state.counts.get(which)
            if entry is None:
                entry = state.counts[which] = _new(run.rundir, which)
            entry[1] += 1
            os.pwrite(state.file, b"%0*d" % (_DIGITS, entry[1]), entry[0])
    except OSError as error:
        interrupts.pass_on(error)
        state.on = False


def _new(directory: RunDir, which: tuple[str, int | None, bool]) -> list[int]:
    if state.file < 0:
        folder = directory.make(directory.path / FOLDER)
        for number in itertools.count():
            path = folder / f"{identity.HOST}-{os.getpid()}.{number}.txt"
            try:
                state.file = files.descriptor(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, held=True)
                break
            except FileExistsError as error:
                interrupts.pass_on(error)
    line = json.dumps(which).encode() + b" "
    place = state.end + len(line)
    os.pwrite(state.file, line + b"0" * _DIGITS + b"\n", state.end)
    state.end = place + _DIGITS + 1
    return [place, 0]
