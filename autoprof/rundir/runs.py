"""Reader of runs on disk: it finds a run by name, and returns its state, steps and captures."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import Struct

from autoprof.base import files, identity, units
from autoprof.base.originals import os, time
from autoprof.base.units import did_you_mean
from autoprof.rundir import file_names, layout, processes, ranks
from autoprof.rundir.file_names import (
    EXIT,
    META,
    NPU_FOLDER,
    NSYS_REPORT,
    PART,
    RAW_ENDINGS,
    RUN,
    SNAPSHOT,
    TRACE,
    is_merged,
)
from autoprof.rundir.layout import RunDir
from autoprof.rundir.processes import ProcessState
from autoprof.rundir.records import BegunLine, CaptureMeta, Line, MergedMeta, OpenSpan, RunFile

_MAX_NAMED_RUNS, _MAX_NAMED_STEPS = 5, 5
_TRACES = (".json", ".json.gz")


def describe_no_run(path: Path) -> str:
    """Return a message that `path` is not a run directory. It names the path to give instead, or the contents."""
    for parent in path.absolute().parents:
        if (parent / RUN).is_file():
            folder = layout.step_folder(path.name)
            return f"{path} is not a run but a part of one; give {parent}{_options(folder) if folder else ''}"
    if not path.is_dir():
        return f"{path} is not a run but a file; a run is a folder with a {RUN}"
    return f"{path} is not a run: it has no {RUN}; {folder_contents(path)}"


def _options(folder: layout.StepFolder) -> str:
    """Return the options that name a step in a command."""
    return f" --step {folder.number}" + (f" --loop {folder.loop}" if folder.loop > 1 else "")


def folder_contents(path: Path) -> str:
    """Return a text about the contents of a folder, for a message.

    The text lists the runs in the folder. If the folder has no runs, the text has the number of files of each kind.
    """
    try:
        entries = sorted(entry for entry in path.iterdir() if entry.name != ".gitignore")
        for folder in (path, *(entry for entry in entries if entry.is_dir() and not entry.is_symlink())):
            files_of_runs = (file for file in sorted(folder.glob(f"*/{RUN}")) if not file.parent.is_symlink())
            if names := [file.parent.name for file in files_of_runs]:
                more_text = "..., " if len(names) > _MAX_NAMED_RUNS else ""
                listed = f"{more_text}{', '.join(names[-_MAX_NAMED_RUNS:])}"
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


# State of a capture or run if its process vanished.
UNFINISHED = "unfinished"
# Endings of the names of complete files of a capture, and of its incomplete files.
_COMPLETE_ENDINGS = (TRACE, SNAPSHOT, NSYS_REPORT)
_PART_ENDINGS = tuple(f"{ending}{PART}" for ending in (TRACE, *RAW_ENDINGS, META))


class _CachedCapture(Struct, array_like=True):
    """A capture in the cache: its name, the name and the size of its trace, and the fields of its meta file."""

    name: str
    trace: str
    bytes: int
    fields: dict[str, Any]


class _CachedStep(Struct, array_like=True):
    """The captures in a step's folder, and the inode, size and time of change of the folder when they were read."""

    stamp: layout.Stamp
    captures: list[_CachedCapture]


# Name of the part of the cache with the captures: a dict from the name of a step's folder to its captures.
_PART = "captures"
# Number of captures from which the captures of a run are cached.
_MANY_CAPTURES = 1_000
# A folder that has not changed for this time gets a new time of change if it changes later. If it changes twice within
# a shorter time, the time of change may stay the same.
_SETTLED_NS = 2_000_000_000


class CaptureFile:
    """One capture in a step's folder.

    The files of the capture are read on first use, because a run may have thousands of captures.

    Attributes:
        name: The common name of the capture's files, without endings.
        left_out: The problems that were found while these files were read.
    """

    def __init__(self, folder: str, name: str, trace: str = "") -> None:
        self.name = name
        self.left_out: list[str] = []
        self._folder = folder
        self._trace = trace

    @cached_property
    def bytes(self) -> int:
        """Return the size of the trace in bytes; 0 if the capture has no trace."""
        try:
            return files.size(f"{self._folder}/{self._trace}") if self._trace else 0
        except OSError as error:  # the file was renamed or removed
            self.left_out.append(f"{self._trace}: it can't be read: {error.strerror}")
            return 0

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Return the fields of the meta file as a dict; empty if the file does not exist."""
        kind = MergedMeta if is_merged(self.name) else CaptureMeta
        return layout.fields(f"{self._folder}/{self.name}{META}", kind, self.left_out)

    @property
    def state(self) -> str:
        """Return the state in the meta file, or `unfinished` if the capture has no meta file."""
        return str(self.fields.get("state", UNFINISHED))

    @cached_property
    def meta(self) -> CaptureMeta:
        """Return the meta file as a struct, for a capture that is not a merged trace."""
        return layout.record(self.fields, CaptureMeta)

    @property
    def untraced(self) -> bool:
        """Return True if the process was not meant to record a trace. `meta.reason` gives the reason."""
        return self.state == "complete" and self.fields.get("tool") == "none"

    @cached_property
    def merged(self) -> MergedMeta:
        """Return the meta file as a struct, for a merged trace."""
        return layout.record(self.fields, MergedMeta)

    def to_cache(self) -> _CachedCapture:
        """Return the capture in the form that is written into the cache."""
        return _CachedCapture(self.name, self._trace, self.bytes, self.fields)

    @classmethod
    def from_cache(cls, folder: str, cached: _CachedCapture) -> CaptureFile:
        """Return a capture whose files are not read, because the cache has their content."""
        capture = cls(folder, cached.name, cached.trace)
        capture.bytes, capture.fields = cached.bytes, cached.fields
        return capture

    def described(self) -> dict[str, Any]:
        """Return the capture as a dict that can be written as JSON."""
        return {"name": self.name, "bytes": self.bytes, "state": self.state, "meta": self.fields}


def loop_of(step: Line | BegunLine | OpenSpan) -> int:
    """Return the number of a step's loop in its process."""
    loop = step.ids.get("loop")
    return loop if isinstance(loop, int) and loop > 0 else 1


def label(number: int, loop: int) -> str:
    """Return the number of a step, and the number of its loop unless it is the first."""
    return f"{number}" if loop == 1 else f"{number} (loop {loop})"


class Step:
    """The captures in the folder of one step.

    Attributes:
        number: The global step.
        loop: The number of the step's loop.
        captures: The captures, sorted by name.
        merged: The merged traces, sorted by name.
        all_captures: The captures, then the merged traces.
        left_out: The reason why the folder could not be read, if it could not.
        folder: The path of the folder.
        stamp: The inode, size and time of change of the folder, as in `layout.stamp`.
        is_cached: True if the captures come from the cache.
        shares_folder: True if the folder also has captures of a step of another loop.
    """

    shares_folder = False

    def __init__(self, number: int, folder: str, cached: _CachedStep | None = None, loop: int = 1) -> None:
        self.number = number
        self.loop = loop
        self.folder = folder
        self.left_out: list[str] = []
        self.stamp = layout.stamp(folder)
        self.is_cached = cached is not None and cached.stamp == self.stamp
        try:
            captures = (
                [CaptureFile.from_cache(folder, capture) for capture in cached.captures]
                if cached is not None and self.is_cached
                else _captures(folder)
            )
        except FileNotFoundError:  # a step that was not captured has no folder
            captures = []
        except OSError as error:
            self.left_out.append(f"{os.path.basename(folder)}: it can't be read: {error.strerror}")
            captures = []
        self.captures = [capture for capture in captures if not is_merged(capture.name)]
        self.merged = [capture for capture in captures if is_merged(capture.name)]
        self.all_captures = [*self.captures, *self.merged]

    def of_loop(self, loop: int) -> Step:
        """Return the same step with another number of its loop."""
        step = copy.copy(self)
        step.loop = loop
        return step

    @property
    def label(self) -> str:
        """Return the number of the step, and the number of the loop unless it is the first."""
        return label(self.number, self.loop)

    def problems(self) -> list[str]:
        """Return the problems that were found in the files of the step that have been read so far."""
        return [*self.left_out, *(problem for capture in self.all_captures for problem in capture.left_out)]


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
    "a run with AUTOPROF=1 makes its folder when a hook applies or at its end; autoprof doctor lists the recipes"
)
# Name of the link to the newest run.
LATEST = "latest"
# Beginning of the id of a run, if the id contains the start time of the run.
_TIMED_ID = re.compile(r"[0-9]{8}-[0-9]{6}-")


class NotFound(LookupError):
    """The run, step or capture does not exist, or several match the name. The message lists the existing names."""


class Run:
    """A run on disk. The files of the run are read on first use."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.id = os.path.basename(self.path)
        self._left_out: list[str] = []

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Return the content of `run.json` as a dict; empty if the file can't be read."""
        return layout.fields(f"{self.path}/{RUN}", RunFile, self._left_out)

    @cached_property
    def info(self) -> RunFile:
        """Return the content of `run.json` as a struct."""
        return layout.record(self.fields, RunFile)

    @cached_property
    def steps(self) -> list[Step]:
        """Return the steps that have a folder, sorted by loop and number."""
        cached = layout.get_cached(Path(self.path), _PART, dict[str, _CachedStep]) or {}
        folders = layout.step_folders(self.path)
        return [Step(number, f"{self.path}/{name}", cached.get(name), loop) for loop, number, name in folders]

    def keep_captures(self) -> None:
        """Write the captures of a large run into the cache of the run, so that the next command is faster.

        This reads all files of the captures. Do nothing if the run is small, or if all captures came from the cache.
        """
        if len(self.captures) < _MANY_CAPTURES or all(step.is_cached for step in self.steps):
            return
        steps: dict[str, _CachedStep] = {}
        for step in self.steps:
            captures = [capture.to_cache() for capture in step.all_captures]
            is_complete = not step.problems() and all(capture.fields for capture in captures)
            if is_complete and step.stamp is not None and time.time_ns() - step.stamp[2] > _SETTLED_NS:
                steps[os.path.basename(step.folder)] = _CachedStep(step.stamp, captures)
        layout.put_cached(Path(self.path), _PART, steps)

    @cached_property
    def processes(self) -> list[ProcessState]:
        """Return the last states of the processes that have a journal."""
        return processes.read(self.path, write_cache=True)

    @property
    def left_out(self) -> list[str]:
        """Read all files of the run, and return the problems that were found."""
        for capture in (capture for step in self.steps for capture in step.all_captures):
            _ = capture.fields, capture.bytes
        _ = self.fields
        return self._problems()

    def _problems(self) -> list[str]:
        """Return the problems that were found in the files that have been read so far."""
        return [*self._left_out, *(problem for step in self.steps for problem in step.problems())]

    @property
    def captures(self) -> list[CaptureFile]:
        return [capture for step in self.steps for capture in step.captures]

    @property
    def bytes(self) -> int:
        return sum(capture.bytes for capture in self.captures)

    @property
    def state(self) -> str:
        """Return `running`, `ended`, `failed`, or `unfinished` if the process that started the run vanished.

        If the run is running and autoprof is switched off in it, return `running (off)`.
        """
        current = state(self.info, Path(self.path))
        return f"{current} (off)" if current == "running" and layout.switched_off(RunDir(Path(self.path))) else current

    @cached_property
    def without_end(self) -> list[ProcessState]:
        """Return the processes of this host that have reported their end and are still running."""
        return processes.without_end(self.path)

    @cached_property
    def survivors(self) -> list[ProcessState]:
        """Return the processes that are running although the process that started the run vanished."""
        if self.state != UNFINISHED:
            return []
        return [process for process in self.processes if process.state == processes.RUNNING]

    @property
    def is_running(self) -> bool:
        """Return True if the run is running, or if some of its processes outlive the process that started it."""
        return self.state.startswith("running") or bool(self.survivors)

    @property
    def outcome(self) -> str:
        """Return the state of the run, its exception, its exit status and the number of processes that outlive it."""
        current = self.state
        alive = self.survivors or (self.without_end if current in (ENDED, FAILED) else [])
        reasons = [f"{units.count(len(alive), 'process', 'processes')} still running"] if alive else []
        if current == FAILED:
            status = exit_status(Path(self.path))
            reasons = [self.info.error, f"exit status {status}" if status else "", *reasons]
        reason = ", ".join(filter(None, reasons))
        return f"{current} ({reason})" if reason else current

    def described(self) -> dict[str, Any]:
        """Read all files of the run, and return the run as a dict that can be written as JSON."""
        info = self.fields
        steps = []
        for step in self.steps:
            groups = {"captures": step.captures, "merged": step.merged}
            lists = {name: [capture.described() for capture in captures] for name, captures in groups.items()}
            steps.append({"number": step.number, "loop": step.loop, **lists})
        return {"id": self.id, "path": self.path, "info": info, "steps": steps, "left_out": self._problems()}


def state(info: RunFile, path: Path) -> str:
    """Return the state of the run in the folder `path`: `running`, `ended`, `failed` or `unfinished`.

    If `run.json` says `running` and another host started the run, return `running`, because the processes of another
    host are not visible here.
    """
    if info.state == "running":
        if info.host != identity.HOST or processes.is_alive(info.pid, info.ticks) or ranks.is_running(path):
            return info.state
        # The process may have been unable to write `run.json` at its end.
        ended = processes.exited(path, info.host, info.pid, info.ticks)
        return UNFINISHED if ended is None else FAILED if ended.error else ENDED
    status = exit_status(path) if info.state in (ENDED, FAILED) else None
    if status is not None:
        return FAILED if status else ENDED
    return info.state or UNFINISHED


def killed(path: Path) -> str:
    """Return a warning if the process that started a run was killed, or an empty text.

    The next run calls this function at its start. So that a large run does not slow that start down, only `run.json`
    and the journal of that process are read.
    """
    run = Run(path)
    if not run.fields or run.state != UNFINISHED:
        return ""
    info, name = run.info, run.info.id or path.resolve().name
    how = f"its process {info.pid} on {info.host} was killed, crashed, or ended by os._exit or os.exec"
    return f"the previous run, {name}: {how}; see autoprof doctor {name}"


def exit_status(path: Path) -> int | None:
    """Return the exit status of the process that started the run in the folder `path`, or None if it is unknown."""
    content = files.try_read(path / EXIT, 1)
    return content[0] if content else None


def belongs_to_this_user(uid: int | None) -> bool:
    """Return True if `uid` is the id of this user. It is also True for None: the user of the run is unknown."""
    return uid is None or uid == os.geteuid()


def ids_with_users(users: Mapping[str, int | None]) -> str:
    """Return the ids of runs for a message. If a run belongs to another user, add the name of that user.

    Args:
        users: Dict from the id of a run to the id of its user.
    """
    named_runs = [
        run if uid is None or belongs_to_this_user(uid) else f"{run} of user {identity.user_name(uid)}"
        for run, uid in users.items()
    ]
    return ", ".join(named_runs) or "none"


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
    """Return a key that sorts runs by their local start time, then by id.

    Most ids begin with the start time. For all other ids, the start time is read from `run.json`.
    """
    if _TIMED_ID.match(run.id):
        return run.id, ""
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(run.info.started)), run.id


def find(parent: Path, name: str) -> Run:
    """Return the run with the name `name`: a path, an id, the first characters of an id, or `latest`.

    Raises:
        NotFound: No run matches the name, or several runs match it.
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
    listed_ids = ", ".join(run.id for run in (matching or existing)[-_MAX_NAMED_RUNS:]) or "none"
    more_text = "..., " if len(matching or existing) > _MAX_NAMED_RUNS else ""
    if matching:
        raise NotFound(f"several runs match {name!r} in {parent}: {more_text}{listed_ids}; give more of the id")
    hint = did_you_mean(name, [run.id for run in existing])
    raise NotFound(f"no run matches {name!r} in {parent}{hint}; there are {more_text}{listed_ids}")


def read(path: Path) -> Run:
    """Return the run in a directory. Files that can't be read are left out."""
    return Run(path)


def step(run: Run, number: int | None) -> Step:
    """Return a captured step of a run, as `choose_step` does."""
    return choose_step(run.id, run.steps, number, None, {})


def in_several_loops(run_id: str, number: int, loops: Sequence[str]) -> str:
    """Return the message that several loops have a step."""
    return f"{run_id} has step {number} in {' and '.join(loops)}; choose with --loop"


def choose_step(
    run_id: str, steps: Sequence[Step], number: int | None, loop: int | None, names: Mapping[int, str]
) -> Step:
    """Return one of the captured steps of a run. Without a number, return the only captured step.

    Args:
        run_id: The id of the run, for messages.
        steps: The captured steps.
        number: The global step.
        loop: The number of the step's loop; None if only one loop has the step.
        names: Dict from the number of each loop to its name, for messages.

    Raises:
        NotFound: The run has no captured step with this number, or several loops have such a step; or no number is
            given, and the run has no captured step or several.
    """
    captured_steps = [captured for captured in steps if loop in (None, captured.loop)]
    numbers = sorted({captured.number for captured in captured_steps})
    matching = [captured for captured in captured_steps if number in (None, captured.number)]
    if len(matching) == 1:
        return matching[0]
    if number is not None and matching:
        loops = [names.get(captured.loop, f"loop {captured.loop}") for captured in matching]
        raise NotFound(in_several_loops(run_id, number, loops))
    if number is None and matching:
        labels = units.ranges(numbers) if len(numbers) == len(matching) else ", ".join(each.label for each in matching)
        raise NotFound(f"{run_id} has several steps; choose with --step: {labels}")
    wanted_step = "captured step" if number is None else f"step {number}"
    wanted_step += "" if loop is None else f" in loop {loop}"
    raise NotFound(f"{run_id} has no {wanted_step}; {no_step(number, numbers)}")


def no_step(number: int | None, numbers: Sequence[int]) -> str:
    """Return a text that lists the existing steps and the step nearest to `number`, for a message."""
    if not numbers:
        return "there are none"
    listed = ", ".join(map(str, numbers)) if len(numbers) <= _MAX_NAMED_STEPS else units.ranges(numbers)
    nearest = min(numbers, key=lambda existing: abs(existing - (number or 0)))
    return f"there are {listed}" + ("" if number is None or len(numbers) == 1 else f"; the nearest is {nearest}")
