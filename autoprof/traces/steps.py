"""Merges the traces of a step: which ones, in which order and under which names, and what is said of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autoprof import __version__, _files, listing, rundir, tables
from autoprof.listing import CaptureFile, NotFound, Run, Step
from autoprof.rundir import MERGED, META, TRACE, RunDir
from autoprof.settings import Settings
from autoprof.traces.merge import Input, Summary, merge
from autoprof.traces.reader import TraceError

ROLLOUT = "rollout"

# Perfetto in a browser takes 2.7 times the JSON in memory (307 MB: 0.83 GB, v52), of which it has 4 GB.
_VIEWER_BYTES = 1 << 30
# From what drives a step down to what it calls; a role that is not here comes last.
_ROLES = ("trainer", "actor", "ref", "critic", "reward", "agent_loop", "rollout")
_WHO = re.compile(r"(rank|replica)\d+")
_PID = re.compile(r"pid\d+")


def merge_step(run: Run, step: Step, roles: str = "*", output: Path | None = None) -> Iterable[str]:
    """Merge a step's traces into one file, and say what came of it.

    Args:
        run: The run.
        step: The step.
        roles: Patterns for the roles that are merged.
        output: The file, by default `merged.pt.trace.json.gz` in the step's folder.

    Raises:
        NotFound: There is nothing to merge.
        TraceError: A trace can't be used.
        OSError: The file can't be written.
    """
    folder = RunDir(Path(run.path)).step(step.number)
    wanted = Settings(roles=tuple(word.strip() for word in roles.split(",")))
    taken = inputs(folder, [capture for capture in step.captures if any(map(wanted.takes_role, _roles(capture)))])
    if not taken:
        there = ", ".join(dict.fromkeys(map(role, step.captures))) or "none"
        raise NotFound(f"{run.id} has no trace of {roles} in step {step.number}; there are roles {there}")
    _files.open_as(run.path)
    made = output or RunDir(Path(run.path)).make(folder) / f"{MERGED}{TRACE}"
    summary = merge(taken, made)
    if output is None:
        rundir.write_json(folder / f"{MERGED}{META}", _meta(step.number, taken, summary))
    yield (
        f"{made}: {summary.traces} traces, {summary.events} events, "
        f"{tables.size(summary.bytes)} ({tables.size(summary.json_bytes)} of JSON)"
    )
    if summary.hosts > 1:
        yield f"the clocks of {summary.hosts} hosts are taken as they are set"
    if summary.json_bytes > _VIEWER_BYTES:
        yield "a browser may not open that much; --role chooses, or use Perfetto's trace_processor"
    for path in sorted(folder.glob("*_ascend_pt")):
        yield f"not merged, no Chrome trace: {path.name}"


def merge_replicas(path: Path) -> None:
    """Give each rollout replica that has several traces of a step one that holds them all, where it has none yet.

    What goes wrong stands in the meta file. Nothing is raised.
    """
    for step in listing.read(path).steps:
        folder = RunDir(path).step(step.number)
        replicas: dict[str, list[CaptureFile]] = {}
        for capture in step.captures:
            if role(capture) == ROLLOUT and capture.meta.get("replica") is not None:
                replicas.setdefault(f"{ROLLOUT}.replica{capture.meta['replica']}.{MERGED}", []).append(capture)
        known = {capture.name: capture.meta.get("merged") for capture in step.merged if capture.state == "complete"}
        for name, captures in replicas.items():
            taken = inputs(folder, captures)
            if len(taken) < 2 or known.get(name) == [each.path.name for each in taken]:
                continue
            try:
                content = _meta(step.number, taken, merge(taken, folder / f"{name}{TRACE}", jobs=1))
            except (TraceError, OSError) as error:
                content = _meta(step.number, taken, reason=str(error))
            try:
                rundir.write_json(folder / f"{name}{META}", content | {"role": ROLLOUT, **_replica(taken)})
            except OSError:  # the disk is full; there is nobody to tell
                pass


def _replica(taken: list[Input]) -> dict[str, Any]:
    return {name: taken[0].meta.get(name) for name in ("stage", "replica")}


def _meta(step: int, taken: list[Input], summary: Summary | None = None, reason: str = "") -> dict[str, Any]:
    return {
        "step": step,
        "tool": "merge",
        "merged": [each.path.name for each in taken],
        "versions": {"autoprof": __version__},
        "bytes": summary.bytes if summary else 0,
        "state": "complete" if summary else "failed",
        "reason": reason,
    }


def inputs(folder: Path, captures: list[CaptureFile]) -> list[Input]:
    """The traces of a step's folder among `captures`, in the order in which they are shown."""
    found = [capture for capture in captures if (folder / f"{capture.name}{TRACE}").is_file()]
    several = len({capture.meta.get("host") for capture in found}) > 1
    return [_input(folder, capture, several) for capture in sorted(found, key=_order)]


def role(capture: CaptureFile) -> str:
    """The role of a capture, as its name says it."""
    return capture.name.split(".", 1)[0]


def _roles(capture: CaptureFile) -> list[str]:
    """The roles of a capture: one of a whole step holds all that its process has."""
    return role(capture).split("+")


def _input(folder: Path, capture: CaptureFile, with_host: bool) -> Input:
    label = _label(capture.name)
    host = str(capture.meta.get("host", ""))
    state = "" if capture.state == "complete" else capture.state
    return Input(
        path=folder / f"{capture.name}{TRACE}",
        label=f"{label} {host}" if with_host and host else label,
        detail=", ".join(filter(None, [host and f"on {host}", state])),
        meta=capture.meta,
    )


def _label(name: str) -> str:
    """`actor.update_actor.rank0.node1.pid7` as `actor.update_actor rank0`."""
    words = name.split(".")
    if _PID.fullmatch(words[-1]):
        words = words[:-2]
    who = next((place for place, word in enumerate(words) if _WHO.fullmatch(word)), len(words))
    return " ".join(filter(None, [".".join(words[:who]), *words[who:]]))


def _order(capture: CaptureFile) -> tuple[int, str, int, int, int, str]:
    name, meta = _roles(capture)[0], capture.meta
    place = _ROLES.index(name) if name in _ROLES else len(_ROLES)
    return place, name, _number(meta, "replica"), _number(meta, "rank"), _started(meta), capture.name


def _number(meta: Mapping[str, Any], field: str) -> int:
    value = meta.get(field)
    return value if isinstance(value, int) else 0


def _started(meta: Mapping[str, Any]) -> int:
    try:
        return int(meta["clock"]["start"]["unix_ns"])
    except (KeyError, TypeError, ValueError):
        return 0
