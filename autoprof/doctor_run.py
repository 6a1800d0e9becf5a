"""What `autoprof doctor RUN` says: what applied in a run's processes, and why it lacks a trace."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from autoprof import aftermath, control, doctor, documents, listing, tables
from autoprof._finish import NOT_ANALYSED
from autoprof.doctor import Report
from autoprof.documents import CollectedDocument, ProcessDocument
from autoprof.hooklog import WAITING
from autoprof.report.reading import Reader, timelines
from autoprof.rundir import COLLECTED, RunDir
from autoprof.window import Steps


def examine_run(run: listing.Run) -> Report:
    """What applied in a run's processes, and what it left."""
    report = doctor.Report(subject=f"run: {run.path}")
    info = run.info
    report.facts["state"] = run.state
    report.facts["settings"] = f"steps {info.get('settings', {}).get('steps', '?') or 'none, the timeline alone'}"
    left_out = list(run.left_out)
    paths = sorted(RunDir(Path(run.path)).hooks.glob("*.json"))
    processes = [process for path in paths if (process := documents.read(path, ProcessDocument, left_out))]
    report.facts["processes"] = str(len(processes))
    for process in processes:
        hooks = process.setdefault("hooks", {})
        for hook in hooks.values():
            hook |= {"state": hook.get("state", "unknown"), "reason": hook.get("reason", "")}
            hook.setdefault("called", None)
        states = Counter(hook["state"] for hook in hooks.values())
        fired = [key for key, hook in hooks.items() if hook["called"]]
        counts = ", ".join(f"{states[state]} {state}" for state in ("applied", "failed") if states[state])
        name, pid = process.get("process", "?"), process.get("pid", "?")
        report.facts[f"{process.get('host', '?')} {pid} {name}"] = f"{counts}; fired: {', '.join(fired) or 'none'}"
        for where, error in process.get("errors", {}).items():
            report.problems.append(f"{name} ({pid}): {where}: {error.get('last', '?')}")
    versions = {name: version for process in processes for name, version in process.get("versions", {}).items()}
    doctor.check_versions(report, versions, info.get("settings", {}).get("recipes", []))
    doctor.list_hooks(report, {"hooks": _merged(processes)})
    _check_steps(report, run)
    _check_captures(report, run)
    notes, problems = aftermath.devices(run)
    report.notes += notes + aftermath.out_of_memory(RunDir(Path(run.path)))
    report.problems += problems
    _check_control(report, RunDir(Path(run.path)))
    for lost in documents.read(Path(run.path, COLLECTED), CollectedDocument, left_out).get("missing", ()):
        where = " ".join(filter(None, [lost.get("host"), lost.get("path")]))
        report.problems.append(f"not collected, {where}: {lost.get('reason', '?')}")
    report.problems += left_out
    return report


def _merged(processes: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """One entry a hook for the whole run: the state that says most, and whether it fired anywhere."""
    order = {"skipped": 0, "applied": 1, "failed": 2}
    merged: dict[str, dict[str, Any]] = {}
    for process in processes:
        for key, hook in process["hooks"].items():
            known = merged.setdefault(key, dict(hook))
            called = known["called"] or hook["called"]
            said, before = ((order.get(each["state"], -1), each["reason"] != WAITING) for each in (hook, known))
            if said > before:
                merged[key] = known = dict(hook)
            known["called"] = called
            known["fired"] = "fired" if called else "never called"
    return merged


def _check_steps(report: Report, run: listing.Run) -> None:
    executed = sorted(_executed(report, run))
    report.facts["steps executed"] = f"{executed[0]} to {executed[-1]}" if executed else "none was seen"
    report.facts["steps captured"] = ", ".join(str(step.number) for step in run.steps) or "none"
    if not executed:
        report.problems.append("no step was seen: no hook for a step fired, see the hooks above")
        return
    try:
        steps = Steps.parse(run.info.get("settings", {}).get("steps", ""))
    except ValueError:
        return
    wanted = [number for place, number in enumerate(executed, 1) if steps.match(number, place)]
    there = {step.number for step in run.steps}
    there |= {number for capture in run.captures for number in capture.meta.get("steps", ())}
    for number in wanted:
        if number not in there:
            report.problems.append(f"step {number} was asked for and executed, but has no folder")
    if not wanted and steps.any:
        report.problems.append("the run executed none of the steps that AUTOPROF_STEPS asked for")


def _executed(report: Report, run: listing.Run) -> set[int]:
    reader = Reader()
    files, _ = timelines(Path(run.path))
    numbers = {line.step for file in files for line in reader.spans(file) if line.kind == "step"}
    report.notes += reader.notes()
    return {number for number in numbers if number is not None}


def _check_control(report: Report, directory: RunDir) -> None:
    for name in control.waiting(directory):
        report.notes.append(f"control/{name}: no step has begun since it was asked for, or no trainer looks here")
    for name, became in control.states(directory).items():
        if became.state == "refused":
            report.problems.append(f"control/{name}: it was refused: {became.reason}")
        elif became.reason:
            report.notes.append(f"control/{name}: {became.reason}")
        elif not became.over and not report.facts["state"].startswith("running"):
            report.notes.append(f"control/{name}: the run ended before all of its steps had begun")


def _check_captures(report: Report, run: listing.Run) -> None:
    report.facts["captures"] = f"{len(run.captures)}, {tables.size(run.bytes)}"
    for step in run.steps:
        for capture in [*step.captures, *step.merged]:
            if capture.state == listing.UNFINISHED and run.state.startswith("running"):
                continue
            if capture.state != "complete":
                reason = capture.meta.get("reason") or "its process was ended while it was written"
                report.problems.append(f"step {step.number}, {capture.name}: {capture.state}, {reason}")
            elif capture.meta.get("reason") == NOT_ANALYSED:
                report.notes.append(
                    f"step {step.number}, {capture.name}: {NOT_ANALYSED}; autoprof analyse has it do so"
                )
    asked = "nsys" in run.info.get("settings", {}).get("tool", [])
    if asked and run.captures and all(capture.meta.get("tool") != "nsys" for capture in run.captures):
        report.problems.append("AUTOPROF_TOOL asked for nsys, but no process that was captured ran under it")
    captures = [capture.name for step in run.steps for capture in step.captures]
    for part in RunDir(Path(run.path)).parts() if run.state != "running" else ():
        if not any(part.name.startswith(name) for name in captures):
            report.notes.append(f"{part.relative_to(run.path)}: its process was ended while it was written")
    if run.state == listing.UNFINISHED:
        report.notes.append("the process that started the run ended without a word; run.json is as it was at the start")
