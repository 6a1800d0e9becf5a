"""What captures are called: the name that no other has, taken when the capture begins."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import msgspec

from autoprof import _files, rundir

# What there is of a capture with a name.
_PARTS = tuple(f"{ending}{rundir.PART}" for ending in rundir.RAW_ENDINGS)
_FINAL = (rundir.META, rundir.TRACE, rundir.SNAPSHOT, rundir.NSYS_REPORT, *_PARTS)


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What a capture is of. `rank` is the global rank; `replica` and `part` are the rollout engine's."""

    step: int
    role: str
    stage: str
    rank: int
    replica: int | None = None
    part: str = ""

    def file_name(self, repeat: int) -> str:
        """The capture's name without endings: `repeat` counts the times that the stage ran in the step, from 1."""
        again = f".{repeat}" if repeat > 1 else ""
        who = f"rank{self.rank}" if self.replica is None else f"replica{self.replica}"
        words = [rundir.tidy(self.role)]
        if self.replica is None:
            words.append(f"{rundir.tidy(self.stage)}{again}")
            words.append(who)
        else:
            words.append(f"{who}.{rundir.tidy(self.part)}{again}")
        return ".".join([*words, rundir.HOST, f"pid{os.getpid()}"])


# How often this process had captures of a name: where to look for the next one that is free.
_repeats: Counter[tuple[Subject, str]] = Counter()
os.register_at_fork(after_in_child=_repeats.clear)


class Name:
    """The name of one capture, in the folder of its step.

    Attributes:
        base: The path that its files have in common, without their endings.
        taken: The files by which its names are taken, until there is a meta file.
    """

    def __init__(self, folder: Path, subject: Subject, suffix: str) -> None:
        """Take a name. `suffix` is its last word, if it is not empty.

        Raises:
            OSError: It can't be taken.
        """
        self.taken: list[str] = []
        self._folder = folder
        self._suffix = suffix
        self._repeat = _repeats[subject, suffix] + 1
        self.base = self._take(subject)
        _repeats[subject, suffix] = self._repeat

    def change(self, subject: Subject) -> None:
        """Take the name that `subject` has.

        Raises:
            OSError: It can't be taken.
        """
        if self._of(subject) != self.base.name:
            self.base = self._take(subject)

    def give_back(self) -> None:
        """There is a meta file."""
        _files.remove(*self.taken)

    def _take(self, subject: Subject) -> Path:
        """A name that no other capture has or had: in a container that starts anew the pids are those of before.

        It is taken by a file that is there until the meta file is. So it also tells of captures that were cut off.
        """
        while True:
            base = self._folder / self._of(subject)
            taken = f"{base}{rundir.TAKEN}"
            if _files.claim(taken):
                # Looked for when the name is taken: who had it gives it back when these are there.
                if not any(os.path.lexists(f"{base}{ending}") for ending in _FINAL):
                    self.taken.append(taken)
                    return base
                _files.remove(taken)
            self._repeat += 1

    def _of(self, subject: Subject) -> str:
        return ".".join(filter(None, (subject.file_name(self._repeat), self._suffix)))
