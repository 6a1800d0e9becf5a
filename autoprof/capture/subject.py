"""Subjects of captures, and their unique names, taken when a capture begins."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from autoprof.base import files, identity, process
from autoprof.base.originals import os
from autoprof.rundir import file_names

# Endings of the files of a capture.
_PARTS = tuple(f"{ending}{file_names.PART}" for ending in file_names.RAW_ENDINGS)
_FINAL = (file_names.META, file_names.TRACE, file_names.SNAPSHOT, file_names.NSYS_REPORT, *_PARTS)


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """Subject of a capture. `rank` is the global rank; only rollout engines have `replica` and `part`."""

    step: int
    role: str
    stage: str
    rank: int
    replica: int | None = None
    part: str = ""
    stage_kind: str = ""

    def file_name(self, repeat: int) -> str:
        """Return the capture's file name without endings.

        Args:
            repeat: Number of this run of the stage in the step, from 1.
        """
        again = f".{repeat}" if repeat > 1 else ""
        worker = f"rank{self.rank}" if self.replica is None else f"replica{self.replica}"
        words = [file_names.tidy(self.role)]
        if self.replica is None:
            words.append(f"{file_names.tidy(self.stage)}{again}")
            words.append(worker)
        else:
            words.append(f"{worker}.{file_names.tidy(self.part)}{again}")
        return ".".join([*words, identity.HOST, f"pid{os.getpid()}"])


class _NamesState(process.State):
    """Number of this process's captures by name. The next capture of that name gets the next number."""

    def begin(self) -> None:
        self.repeats: Counter[tuple[Subject, str]] = Counter()

    def in_child(self) -> None:
        self.begin()


_state = _NamesState()


class Name:
    """Name of one capture, in the folder of its step.

    Attributes:
        base: Path of its files without their endings.
        taken: Paths of the lock files of its names. They exist until the meta file does.
    """

    def __init__(self, folder: Path, subject: Subject, suffix: str, taken: list[str]) -> None:
        """Take a name. If this is interrupted, the caller must remove the files in `taken`.

        Args:
            folder: The folder of the step.
            subject: The subject of the capture.
            suffix: Last word of the name, or an empty text.
            taken: List to which lock files are added before they are made.

        Raises:
            OSError: The name can't be taken.
        """
        self.taken = taken
        self._folder = folder
        self._suffix = suffix
        self._repeat = _state.repeats[subject, suffix] + 1
        self.base = self._take(subject)
        _state.repeats[subject, suffix] = self._repeat

    def change(self, subject: Subject) -> None:
        """Take the name of another subject.

        Raises:
            OSError: The name can't be taken.
        """
        if self._of(subject) != self.base.name:
            self.base = self._take(subject)

    def give_back(self) -> None:
        """Remove the lock files, once the meta file exists."""
        files.remove(*self.taken)

    def _take(self, subject: Subject) -> Path:
        """Take a name that no other capture has or had. A restarted container has the same pids as before.

        A lock file takes the name until the meta file exists. So it also shows captures whose process was killed.
        """
        while True:
            base = self._folder / self._of(subject)
            taken = f"{base}{file_names.TAKEN}"
            self.taken.append(taken)
            if files.claim(taken):
                # Checked after the name is taken: another capture releases the name only when it has these files.
                if not any(files.exists(f"{base}{ending}", follow=False) for ending in _FINAL):
                    return base
                files.remove(taken)
            self.taken.remove(taken)
            self._repeat += 1

    def _of(self, subject: Subject) -> str:
        return ".".join(filter(None, (subject.file_name(self._repeat), self._suffix)))
