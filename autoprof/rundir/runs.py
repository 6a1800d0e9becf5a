"""Runs on disk: search by name, state, steps and captures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw, Struct

from autoprof.base import files, identity, units
from autoprof.base.originals import os, time
from autoprof.base.units import did_you_mean
from autoprof.rundir import cache, decoder, file_names, folds, layout, processes, ranks
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
from autoprof.rundir.processes import ProcessState
from autoprof.rundir.records import CaptureMeta, MergedMeta, RunFile

_MAX_NAMED_RUNS, _MAX_NAMED_STEPS = 5, 5
_TRACES = (".json", ".json.gz")


def describe_no_run(path: Path) -> str:
    """Return a message that a path is not a run, with its contents and the path to give instead."""
    for parent in path.absolute().parents:
        if (parent / RUN).is_file():
            step = f" --step {int(number)}" if (number := path.name.removeprefix(STEP)).isdecimal() else ""
            return f"{path} is not a run but a part of one; give {parent}{step}"
    if not path.is_dir():
        return f"{path} is not a run but a file; a run is a folder with a {RUN}"
    return f"{path} is not a run: it has no {RUN}; {folder_contents(path)}"


def folder_contents(path: Path) -> str:
    """Describe the contents of a folder for a message: its runs, or else the number of files of each kind."""
    try:
        entries = sorted(entry for entry in path.iterdir() if entry.name != ".gitignore")
        for folder in (path, *(entry for entry in entries if entry.is_dir() and not entry.is_symlink())):
            files_of_runs = (file for file in sorted(folder.glob(f"*/{RUN}")) if not file.parent.is_symlink())
            if names := [file.parent.name for file in files_of_runs]:
                more = "..., " if len(names) > _MAX_NAMED_RUNS else ""
                listed = f"{more}{', '.join(names[-_MAX_NAMED_RUNS:])}"
                where = "it holds" if folder == path else f"its folder {folder.name} holds"
                return f"{where} {units.count(len(names), 'run')}: {listed}; use --dir {folder}"
    except OSError as error:
        return f"it can't be read: {error.strerror}"
    kinds = Counter("folder" if entry.is_dir() else _kind(entry) for entry in entries)
    if not kinds:
        return "it is empty"
    counts = f"it has {', '.join(units.count(number, kind) for kind, number in kinds.most_common(_MAX_NAMED_RUNS))}"
    traces = any(entry.name.endswith(_TRACES) for entry in entries if entry.is_file())
    return f"{counts}; autoprof merge {path} takes traces without a run" if traces else counts


def _kind(path: Path) -> str:
    ending = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    return f"{ending[1:].upper()} file" if ending else "file"


# State of a capture or a run whose process vanished.
UNFINISHED = "unfinished"
# Endings of a capture's complete files, and of its unfinished files.
_COMPLETE_ENDINGS = (TRACE, SNAPSHOT, NSYS_REPORT)
_PART_ENDINGS = tuple(f"{ending}{PART}" for ending in (TRACE, *RAW_ENDINGS, META))


class _CachedCapture(Struct, array_like=True):
    """A capture in the cache: its name, its trace and the trace's size, and the fields of its meta file.

    `ls` needs the other values only, so the fields are decoded on first use.
    """

    name: str
    trace: str
    bytes: int
    state: str
    tool: str
    fields: Raw


class _CachedStep(Struct, array_like=True):
    """The captures of a step's folder that had this inode, size and time of change."""

    stamp: cache.Stamp
    captures: list[_CachedCapture]


# The part of the cache with the captures, by the name of the step's folder.
_PART = "captures"
# Captures from which a run has a cache of them.
_MANY_CAPTURES = 1_000
# Age from which a folder's time of change shows each later change.
_SETTLED_NS = 2_000_000_000


class CaptureFile:
    """One capture in a step's folder. Its files are read on first use, because a run may have thousands of captures.

    Attributes:
        name: The common name of its files, without endings.
        left_out: The problems found while reading its files.
    """

    def __init__(self, folder: str, name: str, trace: str = "", cached: _CachedCapture | None = None) -> None:
        self.name = name
        self.left_out: list[str] = []
        self._folder = folder
        self._trace = trace
        self._cached = cached

    @cached_property
    def bytes(self) -> int:
        """Return the size of its trace; 0 without a trace."""
        if self._cached is not None:
            return self._cached.bytes
        try:
            return files.size(f"{self._folder}/{self._trace}") if self._trace else 0
        except OSError as error:  # the file was renamed or removed
            self.left_out.append(f"{self._trace}: it can't be read: {error.strerror}")
            return 0

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Return the fields of the meta file; empty if it does not exist."""
        if self._cached is not None:
            cached: dict[str, Any] = msgspec.msgpack.decode(self._cached.fields)
            return cached
        kind = MergedMeta if is_merged(self.name) else CaptureMeta
        return decoder.fields(f"{self._folder}/{self.name}{META}", kind, self.left_out)

    @property
    def state(self) -> str:
        """Return the state in the meta file, or `unfinished`."""
        return self._cached.state if self._cached is not None else str(self.fields.get("state", UNFINISHED))

    @cached_property
    def meta(self) -> CaptureMeta:
        """Return the meta file."""
        return decoder.record(self.fields, CaptureMeta)

    @property
    def untraced(self) -> bool:
        """Return True if this process was not meant to record a trace, for the reason in `meta.reason`."""
        tool = self._cached.tool if self._cached is not None else self.fields.get("tool")
        return self.state == "complete" and tool == "none"

    @cached_property
    def merged(self) -> MergedMeta:
        """Return the meta file of a merged trace."""
        return decoder.record(self.fields, MergedMeta)

    def to_cache(self) -> _CachedCapture:
        """Return the capture for the cache."""
        fields, tool = Raw(msgspec.msgpack.encode(self.fields)), str(self.fields.get("tool", ""))
        return self._cached or _CachedCapture(self.name, self._trace, self.bytes, self.state, tool, fields)

    def described(self) -> dict[str, Any]:
        """Return the capture as JSON content."""
        return {"name": self.name, "bytes": self.bytes, "state": self.state, "meta": self.fields}


class Step:
    """One step's folder.

    Attributes:
        captures: Its captures, sorted by name.
        merged: The merged traces.
        left_out: The reason, if the folder could not be read.
        folder: The path of the folder.
        stamp: The state of the folder.
        is_cached: True if the captures are from the cache.
    """

    def __init__(self, number: int, folder: str, cached: _CachedStep | None = None) -> None:
        self.number = number
        self.folder = folder
        self.left_out: list[str] = []
        self.stamp = cache.stamp(folder)
        self.is_cached = cached is not None and cached.stamp == self.stamp
        try:
            captures = (
                [CaptureFile(folder, each.name, each.trace, each) for each in cached.captures]
                if cached is not None and self.is_cached
                else _captures(folder)
            )
        except FileNotFoundError:  # a step that was not captured has no folder
            captures = []
        except OSError as error:
            self.left_out.append(f"{os.path.basename(folder)}: it can't be read: {error.strerror}")
            captures = []
        self.captures: list[CaptureFile] = []
        self.merged: list[CaptureFile] = []
        for capture in captures:
            (self.merged if is_merged(capture.name) else self.captures).append(capture)


def _captures(folder: str) -> list[CaptureFile]:
    names: dict[str, str] = {}
    for entry in sorted(os.listdir(folder)):
        if entry.endswith(NPU_FOLDER) and (npu := file_names.FOLDER.search(entry)):
            names[entry.removesuffix(npu.group())] = entry
            continue
        for ending in _PART_ENDINGS if entry.endswith(PART) else (META, *_COMPLETE_ENDINGS):
            if entry.endswith(ending):
                name = entry.removesuffix(ending)
                names[name] = entry if ending in _COMPLETE_ENDINGS else names.get(name, "")
                break
    return [CaptureFile(folder, name, trace) for name, trace in sorted(names.items())]


ENDED = "ended"
FAILED = "failed"
NONE_LEFT = (
    "a run makes its folder once it imports a trainer or engine with a recipe; autoprof doctor lists the recipes"
)
# Name of the link to the newest run.
LATEST = "latest"
# Start of an id that contains the time of the run's start.
_TIMED_ID = re.compile(r"[0-9]{8}-[0-9]{6}-")


class NotFound(LookupError):
    """The run, step or capture does not exist, or the name is ambiguous. The message lists what exists."""


class Run:
    """A run on disk. Its files are read on first use."""

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
        cached = cache.get(Path(self.path), _PART, dict[str, _CachedStep]) or {}
        folders = layout.step_folders(self.path)
        return [Step(number, f"{self.path}/{name}", cached.get(name)) for number, name in folders]

    def keep_captures(self) -> None:
        """Write the captures of a large run into its cache, for the next command. This reads all of their files."""
        if len(self.captures) < _MANY_CAPTURES or all(step.is_cached for step in self.steps):
            return
        steps: dict[str, _CachedStep] = {}
        for step in self.steps:
            of_step = sorted([*step.captures, *step.merged], key=lambda capture: capture.name)
            captures = [capture.to_cache() for capture in of_step]
            left_out = [*step.left_out, *(line for capture in of_step for line in capture.left_out)]
            settled = step.stamp is not None and time.time_ns() - step.stamp[2] > _SETTLED_NS
            if step.stamp is not None and settled and not left_out and all(capture.fields for capture in of_step):
                steps[os.path.basename(step.folder)] = _CachedStep(step.stamp, captures)
        cache.put(Path(self.path), _PART, steps)

    @cached_property
    def processes(self) -> list[ProcessState]:
        """Return the last states of the processes that have a journal."""
        return folds.read(Path(self.path))

    @property
    def left_out(self) -> list[str]:
        """Return the problems found while reading all of its files."""
        for capture in (capture for step in self.steps for capture in (*step.captures, *step.merged)):
            _ = capture.fields, capture.bytes
        _ = self.fields
        return self._problems()

    def _problems(self) -> list[str]:
        """Return the problems found while reading files so far."""
        found = [self._left_out]
        for step in self.steps:
            found += [step.left_out, *(capture.left_out for capture in (*step.captures, *step.merged))]
        return [line for lines in found for line in lines]

    @property
    def captures(self) -> list[CaptureFile]:
        return [capture for step in self.steps for capture in step.captures]

    @property
    def bytes(self) -> int:
        return sum(capture.bytes for capture in self.captures)

    @property
    def state(self) -> str:
        """Return `running`, `ended`, `failed`, or `unfinished` if the process that started the run vanished.

        For a running run that is switched off, return `running (off)`.
        """
        current = state(self.info, Path(self.path))
        return f"{current} (off)" if current == "running" and layout.switched_off(RunDir(Path(self.path))) else current

    @property
    def outcome(self) -> str:
        """Return the state. For a failed run, add the exception and the exit status, if known."""
        current = self.state
        if current != FAILED:
            return current
        status = exit_status(Path(self.path))
        reason = ", ".join(filter(None, [self.info.error, f"exit status {status}" if status else ""]))
        return f"{current} ({reason})"

    def described(self) -> dict[str, Any]:
        """Return the run as JSON content. This reads all of its files."""
        info = self.fields
        steps = []
        for step in self.steps:
            groups = {"captures": step.captures, "merged": step.merged}
            lists = {name: [capture.described() for capture in captures] for name, captures in groups.items()}
            steps.append({"number": step.number, **lists})
        return {"id": self.id, "path": self.path, "info": info, "steps": steps, "left_out": self._problems()}


def state(info: RunFile, path: Path) -> str:
    """Return the state of the run in the folder `path`, as in `Run.state`.

    A run that another host started counts as running, because its processes are not visible here.
    """
    if info.state == "running":
        if info.host != identity.HOST or _is_alive(info.pid, info.ticks) or ranks.is_running(path):
            return info.state
        # The process may have been unable to write `run.json` at its end.
        ended = processes.exit_line(path, info.host, info.pid, info.ticks)
        return UNFINISHED if ended is None else FAILED if ended.error else ENDED
    status = exit_status(path) if info.state in (ENDED, FAILED) else None
    if status is not None:
        return FAILED if status else ENDED
    return info.state or UNFINISHED


def killed(path: Path) -> str:
    """Return a warning if the process that started a run was killed, or an empty text.

    Only `run.json` and the journal of that process are read, so that the next run starts as fast after a large run as
    after a small one.
    """
    run = Run(path)
    if not run.fields or run.state != UNFINISHED:
        return ""
    info, name = run.info, run.info.id or path.resolve().name
    how = f"its process {info.pid} on {info.host} was killed, crashed, or ended by os._exit or os.exec"
    return f"the previous run, {name}: {how}; see autoprof doctor {name}"


def exit_status(path: Path) -> int | None:
    """Return the exit status of the process that started the run in the folder `path`, or None if unknown."""
    content = files.try_read(path / EXIT, 1)
    return content[0] if content else None


def _is_alive(pid: int, ticks: int) -> bool:
    """Return True if a process of this host is running. Pids are reused, so its start time `ticks` must match too.

    The start time is ignored if it is 0 (unknown).
    """
    began = identity.start_ticks(pid)
    return began is not None and (not ticks or ticks == began)


def own(uid: int | None) -> bool:
    """Return True if a run belongs to this user, or if its user is unknown."""
    return uid is None or uid == os.geteuid()


def with_users(users: Mapping[str, int | None]) -> str:
    """Return the ids of runs for a message. Add the user's name to runs of other users."""
    named = [
        run if uid is None or own(uid) else f"{run} of user {identity.user_name(uid)}" for run, uid in users.items()
    ]
    return ", ".join(named) or "none"


def runs(parent: Path) -> list[Run]:
    """Return the runs in `AUTOPROF_DIR`, oldest first.

    Raises:
        NotFound: The folder does not exist.
    """
    if not parent.is_dir():
        advice = "give the folder of the runs with --dir or AUTOPROF_DIR"
        raise NotFound(f"there is no folder {str(parent)!r}; {advice}; {NONE_LEFT}")
    with os.scandir(parent) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    existing = [Run(f"{parent}/{name}") for name in names if os.path.lexists(f"{parent}/{name}/{RUN}")]
    return sorted(existing, key=_sort_key)


def _sort_key(run: Run) -> tuple[str, str]:
    """Return the local start time of a run, then its id. Most ids begin with that time; other ids need `run.json`."""
    if _TIMED_ID.match(run.id):
        return run.id, ""
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(run.info.started)), run.id


def find(parent: Path, name: str) -> Run:
    """Return the run with the name `name`: a path, an id, the first characters of an id, or `latest`.

    Raises:
        NotFound: No run matches, or several do.
    """
    for path in (Path(name), parent / name):
        if (path / RUN).is_file():
            return read(path.resolve())
    existing = [] if os.path.lexists(name) and not parent.is_dir() else runs(parent)
    matching = [run for run in existing if run.id.startswith(name)]
    # The link `latest` is missing on file systems without links.
    if name == LATEST and existing:
        return max(existing, key=lambda run: (run.info.started, run.id))
    if len(matching) == 1:
        return matching[0]
    if not matching and os.path.lexists(name):
        raise NotFound(describe_no_run(Path(name)))
    listed = ", ".join(run.id for run in (matching or existing)[-_MAX_NAMED_RUNS:]) or "none"
    more = "..., " if len(matching or existing) > _MAX_NAMED_RUNS else ""
    if matching:
        raise NotFound(f"several runs match {name!r} in {parent}: {more}{listed}; give more of the id")
    hint = did_you_mean(name, [run.id for run in existing])
    raise NotFound(f"no run matches {name!r} in {parent}{hint}; there are {more}{listed}")


def read(path: Path) -> Run:
    """Return the run in a directory. Unreadable parts are left out."""
    return Run(path)


def step(run: Run, number: int | None) -> Step:
    """Return a captured step of a run. Without a number, return the only one.

    Raises:
        NotFound: The step does not exist; or there is no number, and the run has several steps.
    """
    numbers = [captured.number for captured in run.steps]
    if number is None and len(run.steps) == 1:
        return run.steps[0]
    for captured in run.steps:
        if captured.number == number:
            return captured
    if number is None and run.steps:
        raise NotFound(f"{run.id} has several steps; choose with --step: {units.ranges(numbers)}")
    wanted = "captured step" if number is None else f"step {number}"
    raise NotFound(f"{run.id} has no {wanted}; {no_step(number, numbers)}")


def no_step(number: int | None, numbers: Sequence[int]) -> str:
    """Return the existing steps for a message, and the step nearest to `number`."""
    if not numbers:
        return "there are none"
    listed = ", ".join(map(str, numbers)) if len(numbers) <= _MAX_NAMED_STEPS else units.ranges(numbers)
    nearest = min(numbers, key=lambda existing: abs(existing - (number or 0)))
    return f"there are {listed}" + ("" if number is None or len(numbers) == 1 else f"; the nearest is {nearest}")
