"""Subjects of captures, and their unique names, taken when a capture begins."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from autoprof.base import files, identity, process
from autoprof.base.originals import os
from autoprof.rundir import file_names

# What there is of a capture with a name.
_PARTS = tuple(f"{ending}{file_names.PART}" for ending in file_names.RAW_ENDINGS)
_FINAL = (file_names.META, file_names.TRACE, file_names.SNAPSHOT, file_names.NSYS_REPORT, *_PARTS)


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """Subject of a capture. `rank` is the global rank; `replica` and `part` are the rollout engine's."""

    step: int
    role: str
    stage: str
    rank: int
    replica: int | None = None
    part: str = ""
    stage_kind: str = ""

    def file_name(self, repeat: int) -> str:
        """Return the capture's name without endings: `repeat` counts runs of the stage in the step, from 1."""
        again = f".{repeat}" if repeat > 1 else ""
        who = f"rank{self.rank}" if self.replica is None else f"replica{self.replica}"
        words = [file_names.tidy(self.role)]
        if self.replica is None:
            words.append(f"{file_names.tidy(self.stage)}{again}")
            words.append(who)
        else:
            words.append(f"{who}.{file_names.tidy(self.part)}{again}")
        return ".".join([*words, identity.HOST, f"pid{os.getpid()}"])


class _State(process.State):
    """The counts of this process's captures by name: the next free one comes after them."""

    def begin(self) -> None:
        self.repeats: Counter[tuple[Subject, str]] = Counter()

    def in_child(self) -> None:
        self.begin()


_state = _State()


class Name:
    """The name of one capture, in the folder of its step.

    Attributes:
        base: The path that its files have in common, without their endings.
        taken: The files by which its names are taken, until there is a meta file.
    """

    def __init__(self, folder: Path, subject: Subject, suffix: str, taken: list[str]) -> None:
        """Take a name. `suffix` is its last word, if it is not empty. Who is interrupted removes what is in `taken`.

        Raises:
            OSError: It can't be taken.
        """
        self.taken = taken
        self._folder = folder
        self._suffix = suffix
        self._repeat = _state.repeats[subject, suffix] + 1
        self.base = self._take(subject)
        _state.repeats[subject, suffix] = self._repeat

    def change(self, subject: Subject) -> None:
        """Take the name that `subject` has.

        Raises:
            OSError: It can't be taken.
        """
        if self._of(subject) != self.base.name:
            self.base = self._take(subject)

    def give_back(self) -> None:
        """Give the names back: there is a meta file."""
        files.remove(*self.taken)

    def _take(self, subject: Subject) -> Path:
        """Take a name that no other capture has or had: in a container that starts anew the pids are those of before.

        It is taken by a file that is there until the meta file is. So it also tells of captures that were cut off.
        """
        while True:
            base = self._folder / self._of(subject)
            taken = f"{base}{file_names.TAKEN}"
            self.taken.append(taken)
            if files.claim(taken):
                # Looked for when the name is taken: who had it gives it back when these are there.
                if not any(files.exists(f"{base}{ending}", follow=False) for ending in _FINAL):
                    return base
                files.remove(taken)
            self.taken.remove(taken)
            self._repeat += 1

    def _of(self, subject: Subject) -> str:
        return ".".join(filter(None, (subject.file_name(self._repeat), self._suffix)))
