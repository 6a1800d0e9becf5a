"""Checks of a run: which hooks applied, which processes died, and why a trace is missing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoprof.base import units
from autoprof.cli.doctor import environment
from autoprof.cli.doctor.environment import Report
from autoprof.config.selection import Steps
from autoprof.report.figures import executed
from autoprof.report.figures.reading import timelines
from autoprof.report.findings import findings
from autoprof.report.hangs import read, sentences
from autoprof.report.hangs.read import OpenSpans
from autoprof.rundir import deaths, decoder, runs
from autoprof.rundir.file_names import COLLECTED, META, NOT_ANALYSED, SNAPSHOT
from autoprof.rundir.layout import RunDir
from autoprof.rundir.open_spans import open_until_now
from autoprof.rundir.processes import WAITING
from autoprof.rundir.records import CollectedFile, HookEntry, HooksFile, OutOfMemoryMeta
from autoprof.rundir.runs import UNFINISHED, CaptureFile, Run
from autoprof.windows import requests


def check_deaths(report: Report, run: Run) -> bool:
    """Add to a report which process died, in front of all other problems; return whether one did."""
    found = deaths.of_run(run)
    if found:
        hosts = len(run.info.hosts)
        report.problems.insert(0, deaths.sentence(found[0], hosts))
        report.notes[:0] = deaths.evidence(found, hosts)
    return bool(found)


def examine_run(run: runs.Run) -> Report:
    """Find out what applied in a run's processes, and what the run left."""
    report = environment.Report(subject=f"run: {run.path}")
    report.facts["state"] = run.outcome
    report.facts["settings"] = f"steps {_steps(run, '?') or 'none, the timeline alone'}"
    left_out = list(run.left_out)
    contents = [decoder.fields(path, HooksFile, left_out) for path in RunDir(Path(run.path)).hooks_files()]
    processes = [decoder.record(content, HooksFile) for content in contents if content]
    report.facts["processes"] = str(len(processes))
    for process in processes:
        states = Counter(hook.state for hook in process.hooks.values())
        fired = [key for key, hook in process.hooks.items() if hook.called]
        counts = ", ".join(f"{states[state]} {state}" for state in ("applied", "failed") if states[state])
        name, pid = process.process or "?", process.pid or "?"
        report.facts[f"{process.host or '?'} {pid} {name}"] = f"{counts}; fired: {', '.join(fired) or 'none'}"
        for where, error in process.errors.items():
            report.problems.append(f"{name} ({pid}): {where}: {error.last or '?'}")
    versions = {name: version for process in processes for name, version in process.versions.items()}
    environment.check_versions(report, versions, run.info.settings.recipes)
    environment.list_hooks(report, {"hooks": _merged(processes)})
    executed_s, notes = executed.steps(Path(run.path))
    report.notes += notes
    shifts = {file.host: file.shift_ns for file in timelines(Path(run.path))[0]}
    opened = read.read_open_spans(run, time.time_ns(), shifts)
    _check_hangs(report, run, opened, executed_s)
    _check_steps(report, run, opened, executed_s)
    _check_captures(report, run)
    notes, problems = devices(run)
    report.notes += notes + out_of_memory(RunDir(Path(run.path)))
    report.problems += problems
    _check_control(report, RunDir(Path(run.path)))
    for lost in decoder.read(Path(run.path, COLLECTED), CollectedFile, left_out).missing:
        where = " ".join(filter(None, [lost.host, lost.path]))
        report.problems.append(f"not collected, {where}: {lost.reason or '?'}")
    report.problems += left_out
    if not check_deaths(report, run):
        _check_end(report, run)
    report.verdict = environment.problems_found(report)
    return report


def _merged(processes: list[HooksFile]) -> dict[str, dict[str, Any]]:
    """Return one entry a hook for the whole run: the state that says most, and whether it fired anywhere."""
    order = {"skipped": 0, "applied": 1, "failed": 2}
    merged: dict[str, HookEntry] = {}
    fired = {key for process in processes for key, hook in process.hooks.items() if hook.called}
    for process in processes:
        for key, hook in process.hooks.items():
            known = merged.setdefault(key, hook)
            said, before = ((order.get(each.state, -1), each.reason != WAITING) for each in (hook, known))
            if said > before:
                merged[key] = hook
    return {
        key: {"state": hook.state, "reason": hook.reason, "fired": "fired" if key in fired else "never called"}
        for key, hook in merged.items()
    }


def _steps(run: runs.Run, unknown: str) -> str:
    """Return `AUTOPROF_STEPS` of a run."""
    return run.info.settings.steps if "steps" in run.fields.get("settings", {}) else unknown


def _check_hangs(report: Report, run: runs.Run, opened: OpenSpans, executed_s: Mapping[int, float]) -> None:
    """Report steps that are or were stuck, and samples that ended with an exception."""
    found, notes = sentences.hangs_of_run(run.path, opened, executed_s)
    report.notes += notes
    for finding in [*found, *findings.failures_of_run(opened)]:
        report.problems.append(finding.text)
        which = "the run" if finding.step is None else f"step {finding.step}"
        report.notes += [f"{which}: {line}" for line in finding.evidence]


def _check_steps(report: Report, run: runs.Run, opened: OpenSpans, executed_s: Mapping[int, float]) -> None:
    numbers = sorted(executed_s)
    executed = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
    report.facts["steps executed"] = "; ".join([executed, *_open_steps(opened)])
    report.facts["steps captured"] = ", ".join(str(step.number) for step in run.steps) or "none"
    if run.info.no_hooks:
        report.problems.append(f"no hook was applied: {run.info.no_hooks}")
        return
    if not numbers:
        _check_begun(report, run, opened)
        return
    try:
        steps = Steps.parse(run.info.settings.steps)
    except ValueError:
        return
    wanted = [number for place, number in enumerate(numbers, 1) if steps.match(number, place)]
    there = {step.number for step in run.steps}
    there |= {number for capture in run.captures for number in capture.meta.steps}
    for number in wanted:
        if number not in there:
            report.problems.append(f"step {number} was asked for and executed, but has no folder")
    if not wanted and steps.any and not opened.going_on:
        report.problems.append("the run executed none of the steps that AUTOPROF_STEPS asked for")


def _open_steps(opened: OpenSpans) -> list[str]:
    """Return in words which step is open and how long it has been; if several are, the last to begin."""
    steps = sorted((row for row in opened.rows()[0] if row.kind == "step"), key=lambda row: row.start_ns)
    return [
        f"step {row.step} {'has been' if open_until_now(row.state, opened.going_on) else 'was'} open for "
        f"{read.open_for(row, opened.going_on)}"
        for row in steps[-1:]
    ]


def _check_begun(report: Report, run: runs.Run, opened: OpenSpans) -> None:
    """Report a run without steps; while it is young, it may still load its model."""
    if _open_steps(opened):
        return
    if not opened.going_on:
        report.problems.append("no step was seen: no hook for a step fired; --all lists the hooks")
        return
    age = opened.now_ns / 1e9 - run.info.started
    text = f"no step has begun for {units.seconds(age)} since the run started: no hook for a step has fired"
    (report.problems if age >= sentences.STILL_S else report.notes).append(f"{text}; --all lists the hooks")


def _check_control(report: Report, directory: RunDir) -> None:
    for name in requests.waiting(directory):
        report.notes.append(f"control/{name}: no step has begun since it was asked for, or no trainer looks here")
    for name, became in requests.states(directory).items():
        if became.state == "refused":
            report.problems.append(f"control/{name}: it was refused: {became.reason}")
        elif became.reason:
            report.notes.append(f"control/{name}: {became.reason}")
        elif not became.over and not report.facts["state"].startswith("running"):
            report.notes.append(f"control/{name}: the run ended before all of its steps had begun")


def _check_captures(report: Report, run: runs.Run) -> None:
    report.facts["captures"] = f"{len(run.captures)}, {units.size(run.bytes)}"
    untraced = Counter(capture.meta.reason for capture in run.captures if capture.untraced)
    report.facts["captures"] += "".join(f"; {count} without a trace, {reason}" for reason, count in untraced.items())
    for step in run.steps:
        for capture in [*step.captures, *step.merged]:
            if capture.state == UNFINISHED and run.state.startswith("running"):
                continue
            if capture.state != "complete":
                reason = capture.meta.reason or "its process was ended while it was written"
                report.problems.append(f"step {step.number}, {capture.name}: {capture.state}, {reason}")
            elif capture.meta.reason == NOT_ANALYSED:
                report.notes.append(
                    f"step {step.number}, {capture.name}: {NOT_ANALYSED}; autoprof analyse has it do so"
                )
    asked = "nsys" in run.info.settings.tool
    if asked and run.captures and all(capture.meta.tool != "nsys" for capture in run.captures):
        report.problems.append("AUTOPROF_TOOL asked for nsys, but no process that was captured ran under it")
    captures = [capture.name for step in run.steps for capture in step.captures]
    for part in RunDir(Path(run.path)).parts() if run.state != "running" else ():
        if not any(part.name.startswith(name) for name in captures):
            report.notes.append(f"{part.relative_to(run.path)}: its process was ended while it was written")


def _check_end(report: Report, run: runs.Run) -> None:
    if run.state == UNFINISHED:
        report.problems.append(
            "the process that started the run is gone and left no word: it was killed by a signal, or left by "
            "os._exit or os.exec, or found no room to write its end; run.json is as it was at the start"
        )
    if run.state == runs.FAILED:
        report.problems.append(f"the process that started the run {run.outcome}; its own output says more")


def devices(run: Run) -> tuple[list[str], list[str]]:
    """Return notes and problems: traces that hold nothing of the GPU, though their process used one.

    Where other traces of the process do hold something, nothing was in the way: the stage made no use of it.
    """
    found = [
        (step, capture) for step in run.steps for capture in step.captures if capture.meta.device_events is not None
    ]
    seeing = {_process(capture) for _, capture in found if capture.meta.device_events}
    notes, problems = [], []
    for step, capture in found:
        if not capture.meta.device_events:
            where = f"step {step.number}, {capture.name}: nothing of the GPU is in it"
            if _process(capture) in seeing:
                notes.append(f"{where}, though other traces of the process have it: the GPU had nothing to do")
            else:
                problems.append(f"{where}: {capture.meta.device_reason}")
    return notes, problems


def out_of_memory(directory: RunDir) -> list[str]:
    """Return notes on the snapshots in `oom/`."""
    notes = []
    for path in sorted(directory.oom.glob(f"*{META}")):
        meta = decoder.read(path, OutOfMemoryMeta)
        where = f"in step {meta.step}, {meta.role} {meta.stage}, " if meta.step is not None else ""
        asked, free = units.size(meta.asked_bytes), units.size(meta.free_bytes)
        name = f"oom/{path.name.removesuffix(META)}{SNAPSHOT}"
        notes.append(f"{name}: CUDA ran out of memory {where}with {asked} asked for, {free} free")
    return notes


def _process(capture: CaptureFile) -> tuple[object, object]:
    return capture.meta.host, capture.meta.pid
