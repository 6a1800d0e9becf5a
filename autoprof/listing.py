"""Reads what is in run directories."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from autoprof import _finish, control, rundir
from autoprof.documents import MetaDocument, RunDocument
from autoprof.documents import read as document
from autoprof.rundir import META, NSYS_REPORT, PART, RAW_ENDINGS, SNAPSHOT, TRACE, RunDir, is_merged

UNFINISHED = "unfinished"
_WHOLE = (TRACE, SNAPSHOT, NSYS_REPORT)


class NotFound(LookupError):
    """There is no such run, or nothing of what was asked for in it. The message says what there is."""


class CaptureFile(msgspec.Struct, frozen=True):
    """One capture in a step's folder. `state` is its meta file's, or `unfinished`."""

    name: str
    bytes: int
    state: str
    meta: dict[str, Any]


class Step(msgspec.Struct, frozen=True):
    """One step's folder. `merged` are files that hold what captures hold already."""

    number: int
    captures: list[CaptureFile]
    merged: list[CaptureFile]


class Run(msgspec.Struct, frozen=True):
    """A run as it lies on disk. `left_out` says what could not be read of its files."""

    id: str
    path: str
    info: dict[str, Any]
    steps: list[Step]
    left_out: list[str] = []

    @property
    def captures(self) -> list[CaptureFile]:
        return [capture for step in self.steps for capture in step.captures]

    @property
    def bytes(self) -> int:
        return sum(capture.bytes for capture in self.captures)

    @property
    def state(self) -> str:
        """`running`, `ended`, or `unfinished` where the process that started it is gone without a word."""
        said = state(self.info)
        return f"{said} (off)" if said == "running" and control.switched_off(RunDir(Path(self.path))) else said


def state(info: Mapping[str, Any]) -> str:
    """The state of a run, as in `Run.state`, from its `run.json`. Of another host's processes nothing is known."""
    said = str(info.get("state", UNFINISHED))
    if said == "running" and info.get("host") == rundir.HOST and not _alive(info.get("pid"), info.get("ticks")):
        return UNFINISHED
    return said


def _alive(pid: object, ticks: object) -> bool:
    """Whether a process of this host runs. Pids come again: `ticks` is when it began, where that is known."""
    began = rundir.began(pid) if isinstance(pid, int) else None
    return began is not None and (not ticks or ticks == began)


def runs(parent: Path) -> list[Run]:
    """The runs in `AUTOPROF_DIR`, oldest first.

    Raises:
        NotFound: There is no such folder.
    """
    if not parent.is_dir():
        raise NotFound(f"there is no folder {str(parent)!r}; give the folder of the runs with --dir or AUTOPROF_DIR")
    return [read(path.parent) for path in sorted(parent.glob("*/run.json")) if not path.parent.is_symlink()]


def find(parent: Path, name: str) -> Run:
    """The run called `name`: a path, an id, the beginning of one, or `latest`.

    Raises:
        NotFound: There is none, or several.
    """
    for path in (Path(name), parent / name):
        if (path / "run.json").is_file():
            return read(path.resolve())
    matching = [run for run in runs(parent) if run.id.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    found = ", ".join(run.id for run in matching[-5:] or runs(parent)[-5:]) or "none"
    what = "several runs match" if matching else "no run matches"
    raise NotFound(f"{what} {name!r} in {parent}; there are {found}")


def read(path: Path) -> Run:
    """Read one run directory; what can't be read in it is left out."""
    directory = RunDir(path)
    left_out: list[str] = []
    info = document(directory.run_json, RunDocument, left_out)
    steps = [_step(number, folder, left_out) for number, folder in directory.steps()]
    return Run(path.name, str(path), info, steps, left_out)


def load_json(path: Path, kind: Any = dict[str, Any]) -> dict[str, Any]:
    """A JSON object, or an empty one where the file is not there or not whole (`documents.read`)."""
    return document(path, kind)


def step(run: Run, number: int | None) -> Step:
    """A captured step of a run; without a number the only one.

    Raises:
        NotFound: It is not there, or there are several.
    """
    there = ", ".join(str(each.number) for each in run.steps) or "none"
    if number is None and len(run.steps) == 1:
        return run.steps[0]
    for each in run.steps:
        if each.number == number:
            return each
    if number is None and run.steps:
        raise NotFound(f"{run.id} has several steps; choose with --step: {there}")
    raise NotFound(f"{run.id} has no {'captured step' if number is None else f'step {number}'}; there are {there}")


def _step(number: int, folder: Path, left_out: list[str]) -> Step:
    try:
        found = _captures(folder, left_out)
    except OSError as error:
        left_out.append(f"{folder.name}: it can't be read: {error.strerror}")
        found = []
    return Step(
        number,
        [capture for capture in found if not is_merged(capture.name)],
        [capture for capture in found if is_merged(capture.name)],
    )


def _captures(folder: Path, left_out: list[str]) -> list[CaptureFile]:
    halves = [f"{ending}{PART}" for ending in (TRACE, *RAW_ENDINGS, META)]
    names: dict[str, Path | None] = {}
    for path in sorted(folder.iterdir()):
        if npu := _finish.FOLDER.search(path.name):
            names[path.name.removesuffix(npu.group())] = path
            continue
        for ending in (*halves, *_WHOLE, META):
            if path.name.endswith(ending):
                name = path.name.removesuffix(ending)
                names[name] = path if ending in _WHOLE else names.get(name)
                break
    return [_capture(folder, name, trace, left_out) for name, trace in sorted(names.items())]


def _capture(folder: Path, name: str, trace: Path | None, left_out: list[str]) -> CaptureFile:
    meta = document(folder / f"{name}{META}", MetaDocument, left_out)
    size = _finish.size(str(trace)) if trace is not None else 0
    return CaptureFile(name, size, str(meta.get("state", UNFINISHED)), meta)
