"""Counter of the calls of each hook in each step, for `autoprof recipes --try`: `calls/<host>-<pid>.<number>.txt`.

Each change of a count is written immediately, so that a killed process loses no count. Only `autoprof recipes --try`
counts calls.
"""

from __future__ import annotations

import itertools

from autoprof.base import files, identity, process, seam
from autoprof.base.originals import json, os, threading
from autoprof.run import runtime, step_announcement
from autoprof.rundir.layout import RunDir

# `autoprof recipes --try` sets this variable for the processes that it starts.
VARIABLE = "AUTOPROF_TRY"
FOLDER = "calls"
_DIGITS = 15


class _CallCountState(process.State):
    """The counts of this process: a dict from hook, step and `fired` to the position in the file and the count."""

    def begin(self) -> None:
        self.on = bool(os.environ.get(VARIABLE))
        self.forget()

    def in_child(self) -> None:
        if self.file >= 0:
            os.close(self.file)
        self.forget()

    def forget(self) -> None:
        """Forget the file and the counts. The next count begins a new file."""
        # Reentrant: a signal handler may call a hooked function while a count is written.
        self.lock = threading.RLock()
        self.file = -1
        self.end = 0
        self.counts: dict[tuple[str, int | None, bool], list[int]] = {}


state = _CallCountState()


def add(key: str, fired: bool) -> None:
    """Count a call of the function that the hook `key` hooks, in the current step.

    `fired` is true if the hook applies to this call, for example because the conditions of the hook are met.
    """
    run = runtime.current()
    if run is None:
        return
    try:
        with state.lock:
            count_key = key, step_announcement.known(), fired
            entry = state.counts.get(count_key)
            if entry is None:
                entry = state.counts[count_key] = _new(run.rundir, count_key)
            entry[1] += 1
            os.pwrite(state.file, b"%0*d" % (_DIGITS, entry[1]), entry[0])
    except OSError as error:
        seam.pass_on(error)
        state.on = False


def _new(directory: RunDir, count_key: tuple[str, int | None, bool]) -> list[int]:
    if state.file < 0:
        folder = directory.make(directory.path / FOLDER)
        for number in itertools.count():
            path = folder / f"{identity.HOST}-{os.getpid()}.{number}.txt"
            try:
                state.file = files.descriptor(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, held=True)
                break
            except FileExistsError as error:
                seam.pass_on(error)
    line = json.dumps(count_key).encode() + b" "
    offset = state.end + len(line)
    os.pwrite(state.file, line + b"0" * _DIGITS + b"\n", state.end)
    state.end = offset + _DIGITS + 1
    return [offset, 0]
