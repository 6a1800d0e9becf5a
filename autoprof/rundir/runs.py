"""Runs on disk: how to find one, its state, and the captures in its folders."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from autoprof.base import files, identity, interrupts, units
from autoprof.base.originals import os, time
from autoprof.base.similar import did_you_mean
from autoprof.rundir import decoder, file_names, layout, ranks
from autoprof.rundir.file_names import (
    EXIT,
    META,
    NPU_FOLDER,
    NSYS_REPORT,
    PART,
    RAW_ENDINGS,
    RUN,
    SNAPSHOT,
    STEP,
    TRACE,
    is_merged,
)
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import CaptureMeta, MergedMeta, RunFile

_MAX_NAMED_RUNS = 5
_TRACES = (".json", ".json.gz")


def describe_no_run(path: Path) -> str:
    """Say that a file or a folder is no run, what it is, and what to give instead."""
    for parent in path.absolute().parents:
        if (parent / RUN).is_file():
            step = f" --step {int(number)}" if (number := path.name.removeprefix(STEP)).isdecimal() else ""
            return f"{path} is no run, it is part of one; give {parent}{step}"
    if not path.is_dir():
        return f"{path} is no run, it is a file; a run is a folder with a {RUN}"
    return f"{path} is no run: it has no {RUN}; {folder_contents(path)}"


def folder_contents(path: Path) -> str:
    """Say what a folder holds: runs, or else files by their kinds."""
    try:
        names = sorted(each for each in path.iterdir() if each.name != ".gitignore")
        for folder in (path, *(each for each in names if each.is_dir() and not each.is_symlink())):
            if found := [each.parent.name for each in sorted(folder.glob(f"*/{RUN}")) if not each.parent.is_symlink()]:
                more = "..., " if len(found) > _MAX_NAMED_RUNS else ""
                named = f"{more}{', '.join(found[-_MAX_NAMED_RUNS:])}"
                where = "it holds" if folder == path else f"{folder.name} in it holds"
                return f"{where} {units.count(len(found), 'run')}: {named}; use --dir {folder}"
    except OSError as error:
        return f"it can't be read: {error.strerror}"
    kinds = Counter("folder" if each.is_dir() else _kind(each) for each in names)
    if not kinds:
        return "it is empty"
    held = f"it has {', '.join(units.count(number, kind) for kind, number in kinds.most_common(_MAX_NAMED_RUNS))}"
    traces = any(each.name.endswith(_TRACES) for each in names if each.is_file())
    return f"{held}; autoprof merge {path} takes traces without a run" if traces else held


def _kind(path: Path) -> str:
    ending = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    return f"{ending[1:].upper()} file" if ending else "file"


# Of a capture or a run whose process is gone without a word.
UNFINISHED = "unfinished"
_WHOLE = (TRACE, SNAPSHOT, NSYS_REPORT)
_HALVES = tuple(f"{ending}{PART}" for ending in (TRACE, *RAW_ENDINGS, META))


class CaptureFile:
    """One capture in a step's folder. What is told of it is read when it is first asked for: a run has thousands.

    Attributes:
        name: The names of its files, without their endings.
        left_out: What could not be read of its files.
    """

    def __init__(self, folder: str, name: str, trace: str = "") -> None:
        self.name = name
        self.left_out: list[str] = []
        self._folder = folder
        self._trace = trace

    @cached_property
    def bytes(self) -> int:
        """Return the size of its trace, 0 where there is none."""
        try:
            return files.size(f"{self._folder}/{self._trace}") if self._trace else 0
        except OSError as error:  # it has a new name by now, or none
            self.left_out.append(f"{self._trace}: it can't be read: {error.strerror}")
            return 0

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Return the fields of the meta file, none where there is no such file."""
        kind = MergedMeta if is_merged(self.name) else CaptureMeta
        return decoder.fields(f"{self._folder}/{self.name}{META}", kind, self.left_out)

    @property
    def state(self) -> str:
        """Return the state in the meta file, or `unfinished`."""
        return str(self.fields.get("state", UNFINISHED))

    @cached_property
    def meta(self) -> CaptureMeta:
        """Return the meta file."""
        return decoder.record(self.fields, CaptureMeta)

    @property
    def untraced(self) -> bool:
        """Return True if nothing was to be recorded, so that there is no trace; `meta.reason` says why."""
        return self.state == "complete" and self.meta.tool == "none"

    @cached_property
    def merged(self) -> MergedMeta:
        """Return the meta file of a merged trace."""
        return decoder.record(self.fields, MergedMeta)

    def described(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"name": self.name, "bytes": self.bytes, "state": self.state, "meta": self.fields}


class Step:
    """One step's folder.

    Attributes:
        captures: Its captures, by name.
        merged: Files that hold what captures hold already.
        left_out: Why the folder could not be read, if so.
    """

    def __init__(self, number: int, folder: str) -> None:
        self.number = number
        self.left_out: list[str] = []
        try:
            found = _captures(folder)
        except FileNotFoundError:  # the timeline alone may tell of a step
            found = []
        except OSError as error:
            self.left_out.append(f"{os.path.basename(folder)}: it can't be read: {error.strerror}")
            found = []
        self.captures: list[CaptureFile] = []
        self.merged: list[CaptureFile] = []
        for capture in found:
            (self.merged if is_merged(capture.name) else self.captures).append(capture)


def _captures(folder: str) -> list[CaptureFile]:
    names: dict[str, str] = {}
    for entry in sorted(os.listdir(folder)):
        if entry.endswith(NPU_FOLDER) and (npu := file_names.FOLDER.search(entry)):
            names[entry.removesuffix(npu.group())] = entry
            continue
        for ending in _HALVES if entry.endswith(PART) else (META, *_WHOLE):
            if entry.endswith(ending):
                name = entry.removesuffix(ending)
                names[name] = entry if ending in _WHOLE else names.get(name, "")
                break
    return [CaptureFile(folder, name, trace) for name, trace in sorted(names.items())]


ENDED = "ended"
FAILED = "failed"
NONE_LEFT = "a run leaves a folder once it imports a trainer or engine with a recipe: autoprof doctor shows them"
# The link to the run that began last.
LATEST = "latest"
_MOST_NAMED = 5
_TIMED = re.compile(r"[0-9]{8}-[0-9]{6}-")


class NotFound(LookupError):
    """There is no such run, or nothing of what was asked for in it. The message says what there is."""


class Run:
    """A run on disk, read as far as it is asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.id = os.path.basename(self.path)
        self._left_out: list[str] = []

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Return the fields of `run.json`."""
        return decoder.fields(f"{self.path}/{RUN}", RunFile, self._left_out)

    @cached_property
    def info(self) -> RunFile:
        """Return `run.json`."""
        return decoder.record(self.fields, RunFile)

    @cached_property
    def steps(self) -> list[Step]:
        """Return the steps that have a folder, in order."""
        return [Step(number, f"{self.path}/{name}") for number, name in layout.step_folders(self.path)]

    @property
    def left_out(self) -> list[str]:
        """Return what could not be read of all its files."""
        return list(self.described()["left_out"])

    @property
    def captures(self) -> list[CaptureFile]:
        return [capture for step in self.steps for capture in step.captures]

    @property
    def bytes(self) -> int:
        return sum(capture.bytes for capture in self.captures)

    @property
    def state(self) -> str:
        """Return `running`, `ended`, `failed`, or `unfinished` where the process that started it is gone without a
        word."""
        said = state(self.info, Path(self.path))
        return f"{said} (off)" if said == "running" and layout.switched_off(RunDir(Path(self.path))) else said

    @property
    def outcome(self) -> str:
        """Return the state, and of a run that failed the exception and the exit status, as far as they are known."""
        said = self.state
        if said != FAILED:
            return said
        status = exit_status(Path(self.path))
        why = ", ".join(filter(None, [self.info.error, f"exit status {status}" if status else ""]))
        return f"{said} ({why})"

    def described(self) -> dict[str, Any]:
        """Return it as JSON has it, which takes all of its files."""
        info, left_out = self.fields, [*self._left_out]
        steps = []
        for each in self.steps:
            found = {"captures": each.captures, "merged": each.merged}
            lists = {name: [capture.described() for capture in captures] for name, captures in found.items()}
            steps.append({"number": each.number, **lists})
            left_out += each.left_out
            left_out += [line for captures in found.values() for capture in captures for line in capture.left_out]
        return {"id": self.id, "path": self.path, "info": info, "steps": steps, "left_out": left_out}


def state(info: RunFile, path: Path) -> str:
    """Return the state of a run in the folder `path`, as in `Run.state`. Of another host's processes nothing is
    known."""
    if info.state == "running":
        gone = info.host == identity.HOST and not _alive(info.pid, info.ticks) and not ranks.going_on(path)
        return UNFINISHED if gone else info.state
    status = exit_status(path) if info.state in (ENDED, FAILED) else None
    if status is not None:
        return FAILED if status else ENDED
    return info.state or UNFINISHED


def exit_status(path: Path) -> int | None:
    """Return the exit status of the process that started the run in the folder `path`, or None where it is not
    known."""
    with interrupts.suppress(OSError):
        if content := files.read(path / EXIT, 1):
            return content[0]
    return None


def _alive(pid: int, ticks: int) -> bool:
    """Return whether a process of this host runs. Pids come again: `ticks` is when it began, where that is known."""
    began = identity.start_ticks(pid)
    return began is not None and (not ticks or ticks == began)


def own(uid: int | None) -> bool:
    """Return whether a run is this user's; True if its user is not known."""
    return uid is None or uid == os.geteuid()


def with_users(users: Mapping[str, int | None]) -> str:
    """Return ids of runs for a message, with the user of each run that is another user's."""
    named = [
        run if uid is None or own(uid) else f"{run} of user {identity.user_name(uid)}" for run, uid in users.items()
    ]
    return ", ".join(named) or "none"


def runs(parent: Path) -> list[Run]:
    """Return the runs in `AUTOPROF_DIR`, oldest first.

    Raises:
        NotFound: There is no such folder.
    """
    if not parent.is_dir():
        where = "give the folder of the runs with --dir or AUTOPROF_DIR"
        raise NotFound(f"there is no folder {str(parent)!r}; {where}; {NONE_LEFT}")
    with os.scandir(parent) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    found = [Run(f"{parent}/{name}") for name in names if os.path.lexists(f"{parent}/{name}/{RUN}")]
    return sorted(found, key=_began)


def _began(run: Run) -> tuple[str, str]:
    """Return the local time at which a run began, with which most ids begin; launchers and users give others."""
    if _TIMED.match(run.id):
        return run.id, ""
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(run.info.started)), run.id


def find(parent: Path, name: str) -> Run:
    """Return the run called `name`: a path, an id, the beginning of one, or `latest`.

    Raises:
        NotFound: There is none, or several.
    """
    for path in (Path(name), parent / name):
        if (path / RUN).is_file():
            return read(path.resolve())
    there = [] if os.path.lexists(name) and not parent.is_dir() else runs(parent)
    matching = [run for run in there if run.id.startswith(name)]
    # Where the link is not there: some file systems have none.
    if name == LATEST and there:
        return max(there, key=lambda run: (run.info.started, run.id))
    if len(matching) == 1:
        return matching[0]
    if not matching and os.path.lexists(name):
        raise NotFound(describe_no_run(Path(name)))
    found = ", ".join(run.id for run in (matching or there)[-_MOST_NAMED:]) or "none"
    more = "..., " if len(matching or there) > _MOST_NAMED else ""
    if matching:
        raise NotFound(f"several runs match {name!r} in {parent}: {more}{found}; give more of the id")
    hint = did_you_mean(name, [run.id for run in there])
    raise NotFound(f"no run matches {name!r} in {parent}{hint}; there are {more}{found}")


def read(path: Path) -> Run:
    """Return the run in a directory; what can't be read in it is left out."""
    return Run(path)


def step(run: Run, number: int | None) -> Step:
    """Return a captured step of a run; without a number the only one.

    Raises:
        NotFound: It is not there, or there are several.
    """
    numbers = [each.number for each in run.steps]
    if number is None and len(run.steps) == 1:
        return run.steps[0]
    for each in run.steps:
        if each.number == number:
            return each
    if number is None and run.steps:
        raise NotFound(f"{run.id} has several steps; choose with --step: {units.ranges(numbers)}")
    what = "captured step" if number is None else f"step {number}"
    raise NotFound(f"{run.id} has no {what}; {no_step(number, numbers)}")


def no_step(number: int | None, numbers: Sequence[int]) -> str:
    """Say which steps there are, and which of them is near the one that was asked for."""
    if not numbers:
        return "there are none"
    there = ", ".join(map(str, numbers)) if len(numbers) <= _MOST_NAMED else units.ranges(numbers)
    near = min(numbers, key=lambda each: abs(each - (number or 0)))
    return f"there are {there}" + ("" if number is None or len(numbers) == 1 else f"; the nearest is {near}")
