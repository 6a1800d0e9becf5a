"""`autoprof doctor`: checks an environment or a run, and prints a report.

The checks of a run show which hooks applied, which processes died, and why a trace is missing.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from autoprof.base import units
from autoprof.base.redact import hidden_in, plain
from autoprof.cli import arguments, console, hung
from autoprof.cli.documents import Report
from autoprof.config import settings
from autoprof.config.selection import Condition, Steps, steps_in_words
from autoprof.report import causes, findings, hang_state, hangs, places
from autoprof.report.hang_state import OpenSpans
from autoprof.report.remedies import Advised, name_of, remedied
from autoprof.report.timeline import journals_of
from autoprof.rundir import deaths, journal, layout, runs
from autoprof.rundir.file_names import COLLECTED, META, NOT_ANALYSED, SNAPSHOT
from autoprof.rundir.journal import Journal
from autoprof.rundir.layout import RunDir
from autoprof.rundir.processes import ProcessState, merged_hooks, open_until_now
from autoprof.rundir.records import CollectedFile, HookLine, Line, OutOfMemoryMeta
from autoprof.rundir.runs import UNFINISHED, CaptureFile, Run, loop_of
from autoprof.windows import requests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", nargs="?", metavar="RUN", help="a run, as for ls; without it, this environment")
    parser.add_argument("--all", action="store_true", help="list all hooks, problems and notes")
    parser.add_argument("--deep", action="store_true", help="import the targets to check that each hook applies")
    arguments.add_dir(parser)
    arguments.add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if parsed.name:
        report = examine_run(arguments.find_run(parsed))
    else:  # imported here, because a check of a run needs no hooks
        from autoprof.cli.doctor_environment import examine_environment

        report = examine_environment(settings.load(os.environ, Path.cwd()), parsed.deep)
    if report.problems:
        report.verdict = f"{units.count(len(report.problems), 'problem')} found"
    report = _masked_report(report)
    if parsed.json:
        console.print_json(report)
    else:
        show(report, parsed.all)
    return 1 if report.problems else 0


def _masked_report(report: Report) -> Report:
    """Return a copy of a report in which secrets are masked.

    Files that older releases wrote, and the errors of recipes, may contain secrets.
    """
    texts = {name: hidden_in(getattr(report, name)) for name in ("hooks", "problems", "notes")}
    # The title of a process is no name of a secret, also if it ends with `pass`.
    return msgspec.structs.replace(report, facts=dict(hidden_in([*report.facts.items()])), **texts)


# Maximum numbers of problems and of notes that are printed without `--all`.
_MAX_PROBLEMS, _MAX_NOTES = 40, 20


def show(report: Report, show_hooks: bool = False) -> None:
    """Print a report as text: facts, problems, notes, and the verdict.

    If `show_hooks` is true, also print a table of the hooks, and print all problems and notes. Otherwise, print only
    the first problems and notes.
    """
    print(plain(report.subject))
    counts = _counts(report.hooks)
    for name, value in report.facts.items():
        print(*console.wrapped(plain(f"{name}: {'; '.join(filter(None, [value, counts.get(name)]))}"), 2), sep="\n")
    if show_hooks and report.hooks:
        print()
        console.show(["hook", "state", "reason"], _hook_rows(report.hooks))
    for title, lines, max_lines in (
        ("problems", report.problems, _MAX_PROBLEMS),
        ("notes", report.notes, _MAX_NOTES),
    ):
        if lines:
            print(f"\n{title}:")
        for line in lines if show_hooks else lines[:max_lines]:
            first_line, *more_lines = console.wrapped(plain(line), 4)
            print(f"  - {first_line[4:]}", *more_lines, sep="\n")
        if len(lines) > max_lines and not show_hooks:
            print(f"  - and {len(lines) - max_lines} more, which --all lists")
    print(f"\n{plain(report.verdict)}")


def _counts(hooks: list[tuple[str, str, str]]) -> dict[str, str]:
    """Return a text with the number of hooks in each state, such as `5 hooks applied, 2 skipped`, for each target."""
    states: dict[str, Counter[str]] = {}
    for key, state, reason in hooks:
        for_other_release = state == "skipped" and " the hook is for " in reason
        label = "for other releases" if for_other_release else state
        states.setdefault(key.partition("/")[0], Counter())[label] += 1
    return {
        target: f"{', '.join(f'{count} {label}' for label, count in counts.items())}".replace(" ", " hooks ", 1)
        for target, counts in states.items()
    }


def _hook_rows(hooks: list[tuple[str, str, str]]) -> list[list[str]]:
    """Return the rows of the table of hooks.

    The hooks of one target that were skipped for the same reason share a row.
    """
    keys_by_row: dict[tuple[str, str, str], list[str]] = {}
    for key, state, reason in hooks:
        name = key.partition("/")[0] if state == "skipped" else key
        keys_by_row.setdefault((name, state, reason), []).append(key)
    return [
        [keys[0] if len(keys) == 1 else f"{name}: {len(keys)} hooks", state, reason]
        for (name, state, reason), keys in keys_by_row.items()
    ]


# Maximum number of hooks that a problem names.
_MAX_FIRED = 4
# Reason why a file of a capture is not complete.
_CUT_OFF = "its process ended while writing it, or the disk was full"


def check_deaths(report: Report, run: Run) -> bool:
    """If processes died, put the likely first cause in front of the other problems of a report, and return True.

    If the run was stuck before, the hang stays the first problem.
    """
    deaths_of_run = deaths.find_in_run(run)
    if deaths_of_run:
        host_count = len(run.info.hosts)
        sentence, evidence = deaths.sentence(deaths_of_run[0], host_count), deaths.evidence(deaths_of_run, host_count)
        hang = [text for text in report.problems if " stuck for " in text][-1:]
        if hang and causes.hang_came_first(run, deaths_of_run):
            others = [text for text in report.problems if text not in hang]
            report.problems, report.notes = [*hang, f"then {sentence}", *others], [*report.notes, *evidence]
        else:
            report.problems, report.notes = [sentence, *report.problems], [*evidence, *report.notes]
    return bool(deaths_of_run)


def examine_run(run: runs.Run) -> Report:
    """Return a report on a run: the hooks in the processes of the run, the steps and captures, and the problems."""
    report = Report(subject=f"run: {run.path}", verdict="no problems found")
    report.facts["state"] = run.outcome
    report.facts["settings"] = _settings(run)
    left_out = list(run.left_out)
    processes = [state for state in run.processes if state.hooks]
    report.facts["processes"] = str(len(processes)) if processes else "none with hooks"
    report.facts |= _process_facts(processes)
    report.problems += [
        f"{process.process or '?'} ({process.pid or '?'}): {source}: {error.last or '?'}"
        for process in processes
        for source, error in process.errors.items()
    ]
    hooks = _hooks(processes)
    report.notes += _outside_versions(hooks)
    report.add_hooks(hooks)
    executed = _executed(run)
    executed_s = {
        (loop_of(span), span.step): (span.end_ns - span.start_ns) / 1e9 for span in executed if span.step is not None
    }
    report.notes += [
        f"{state.file}: {units.count(state.damaged, 'line')} left out: truncated, or not a span"
        for state in run.processes
        if state.damaged
    ]
    shifts = {file.host: file.shift_ns for file in journals_of(Path(run.path))[0]}
    open_spans = hang_state.read_open_spans(run, shifts)
    hung.ask_late(run, open_spans, executed_s)
    hung.read_silent(run, open_spans)
    refused, failed_tasks = hung.ask_ray(run, open_spans)
    _check_hangs(report, run, open_spans, executed_s, failed_tasks)
    report.problems += [*refused, *hung.without_end(run), *hung.stopped(run, report.problems)]
    report.notes += failed_tasks
    _check_steps(report, run, open_spans, executed)
    report.problems += stages_outside_steps(run, executed)
    _check_captures(report, run)
    notes, problems = devices(run)
    report.notes += notes + out_of_memory(RunDir(Path(run.path)))
    report.problems += problems
    _check_control(report, RunDir(Path(run.path)))
    for part in layout.read_json(Path(run.path, COLLECTED), CollectedFile, left_out).missing:
        place = " ".join(filter(None, [part.host, part.path]))
        report.problems.append(f"not collected, {place}: {part.reason or '?'}")
    report.problems += left_out
    if not check_deaths(report, run):
        _check_end(report, run)
    _check_survivors(report, run)
    run.keep_captures()
    return report


# Maximum number of processes that are listed one by one. If there are more, processes with equal hooks share a line.
_MAX_LISTED = 16
_DIGITS = re.compile(r"[0-9]+")


def _process_facts(processes: list[ProcessState]) -> dict[str, str]:
    """Return a text about the hooks of each process, by the title of the process.

    If there are many processes, return one text for all processes with equal titles and hooks.
    """
    groups: dict[tuple[str, str], list[ProcessState]] = {}
    for process in processes:
        states = Counter(hook.state for hook in process.hooks.values())
        counts = ", ".join(f"{states[state]} {state}" for state in ("applied", "failed") if states[state])
        counts = counts or "no hook applied"
        fired = ", ".join(key for key, hook in process.hooks.items() if hook.called) or "none"
        title = process.process or "?"
        if len(processes) <= _MAX_LISTED:
            title = f"{process.host or '?'} {process.pid or '?'} {title}"
        else:
            title = _DIGITS.sub("*", title)
        groups.setdefault((title, f"{counts}; fired: {fired}"), []).append(process)
    if len(processes) <= _MAX_LISTED:
        return dict(groups.keys())
    facts = {}
    for (pattern, hooks), members in sorted(groups.items(), key=lambda group: -len(group[1])):
        titles = {process.process for process in members}
        title = titles.pop() if len(titles) == 1 else pattern
        hosts = units.count(len({process.host for process in members}), "host")
        facts[f"{units.count(len(members), 'process', 'processes')} on {hosts}, {title}"] = hooks
    return facts


def _executed(run: runs.Run) -> list[Line]:
    """Return the spans of the ended steps."""
    return [span for file in _drivers(run) for span in journal.search(file, (b'"kind":"step"',))]


def _drivers(run: runs.Run) -> list[Journal]:
    """Return the journals of the processes that drive steps."""
    drivers = {state.file for state in run.processes if state.drives}
    return [file for file in journal.journals(run.path) if file.name in drivers]


# Kinds of stages that often run outside of steps.
_OUTSIDE_KINDS = ("validate", "checkpoint", "data")
# Number of calls between steps from which a stage that never runs in a step is a problem.
_MIN_OUTSIDE = 2


def stages_outside_steps(run: runs.Run, executed: Sequence[Line]) -> list[str]:
    """Return a problem for each stage that runs between the steps of its process, and never in a step.

    Such a stage has no row and no capture. `executed` are the spans of the ended steps.
    """
    if len(executed) < _MIN_OUTSIDE:
        return []
    start, end = min(span.start_ns for span in executed), max(span.end_ns for span in executed)
    problems = []
    for file in _drivers(run):
        outside = Counter(
            (span.role, span.name)
            for span in journal.search(file, (b'"step":null',))
            if span.kind == "stage" and span.stage_kind not in _OUTSIDE_KINDS and start < span.start_ns < end
        )
        for (role, name), count in outside.items():
            inside = (
                span
                for span in journal.search(file, (b'"name":%b' % msgspec.json.encode(name),))
                if span.kind == "stage" and span.step is not None and span.role == role
            )
            if count >= _MIN_OUTSIDE and next(inside, None) is None:
                problems.append(
                    f"stage {name} of {role} ran {count} times between steps and never in a step, so it has no row "
                    "and no capture: hook a function for the step that contains it"
                )
    return problems


def _hooks(processes: list[ProcessState]) -> dict[str, HookLine]:
    """Return the last line of each hook over all processes, by the key of the hook.

    If the states of a hook differ between processes, `failed` precedes `applied`, and `applied` precedes `skipped`. An
    applied hook without a reason gets the reason `fired` or `never called`.
    """
    called = {key for process in processes for key, hook in process.hooks.items() if hook.called}
    hooks = merged_hooks((process.hooks for process in processes), "skipped", "applied", "failed")
    for key, hook in hooks.items():
        if hook.state == "applied" and not hook.reason:
            hooks[key] = msgspec.structs.replace(hook, reason="fired" if key in called else "never called")
    return hooks


def _outside_versions(hooks: Mapping[str, HookLine]) -> list[str]:
    """Return a note for each target whose version is outside the range of versions in its recipe."""
    reasons = [
        f"{key.partition('/')[0]} {hook.reason}"
        for key, hook in hooks.items()
        if hook.state == "applied" and " is outside the recipe's range " in hook.reason
    ]
    return [f"{reason}; its hooks were tried anyway" for reason in dict.fromkeys(reasons)]


def _settings(run: runs.Run) -> str:
    """Return the settings that choose the steps of a run. The steps are `?` if `run.json` does not have them."""
    fields = run.fields.get("settings", {})
    try:
        when = msgspec.convert(fields.get("when", []), list[Condition])
    except msgspec.ValidationError:
        when = []
    return steps_in_words(run.info.settings.steps if "steps" in fields else "?", when)


def _check_hangs(
    report: Report,
    run: runs.Run,
    open_spans: OpenSpans,
    executed_s: Mapping[hangs.LoopStep, float],
    failed_tasks: Sequence[str],
) -> None:
    """Add a problem for each step that is or was stuck, and for samples that ended with an exception.

    Args:
        report: The report to add to.
        run: The run.
        open_spans: The open spans of the run.
        executed_s: Dict from the loop and the number of an ended step to its seconds.
        failed_tasks: Sentences about failed tasks of Ray, which may be the reason why a process waits in `ray.get`.
    """
    hang_findings, notes = hangs.hangs_of_run(run.path, open_spans, executed_s)
    report.notes += notes
    advised = Advised(name_of(run.path), run.state.startswith("running"))
    hang_findings.sort(key=lambda finding: finding.is_past)
    for finding in remedied([*hang_findings, *findings.failures_of_run(open_spans)], advised):
        waits_for_ray = not finding.is_past and finding.text.endswith((f"({places.RAY})", f"({places.RAY_WAIT})"))
        report.problems.append("; ".join([finding.text, *(failed_tasks[:1] if waits_for_ray else [])]))
        named = re.match(r"step \d+(?: \(loop \d+\))?", finding.text)
        subject = named[0] if named else "the run" if finding.step is None else f"step {finding.step}"
        # This command is doctor: it does not recommend itself.
        command = "" if finding.command.startswith("autoprof doctor") else f" {finding.command}"
        report.notes += [f"{subject}: {line}" for line in [*finding.evidence, f"{finding.remedy}{command}"]]


def _check_steps(report: Report, run: runs.Run, open_spans: OpenSpans, executed: Sequence[Line]) -> None:
    numbers = sorted({(loop_of(span), span.step) for span in executed if span.step is not None})
    # A step that has ended in one rank may be open in another.
    still_open = {(loop_of(span), span.step) for _, _, span in open_spans.aged() if span.kind == "step"}
    ended = [step for step in numbers if step not in still_open]
    loops = {loop: [number for place, number in ended if place == loop] for loop, _ in ended}
    texts = [f"loop {loop}: {units.ranges(of)}" if loop > 1 else units.ranges(of) for loop, of in loops.items()]
    report.facts["steps executed"] = "; ".join([*(texts or ["none"]), *_open_steps(open_spans)])
    report.facts["steps captured"] = ", ".join(step.label for step in run.steps) or "none"
    if run.info.no_hooks:
        report.problems.append(f"no hook was applied: {run.info.no_hooks}")
        return
    if not numbers:
        _check_begun(report, run, open_spans)
        return
    try:
        steps = Steps.parse(run.info.settings.steps)
    except ValueError:
        return
    requested_steps = [step for ordinal, step in enumerate(numbers, 1) if steps.matches(step[1], ordinal)]
    captured_steps = {(step.loop, step.number) for step in run.steps}
    captured_steps |= {(capture.meta.loop, number) for capture in run.captures for number in capture.meta.steps}
    missing_steps = [step for step in requested_steps if step not in captured_steps]
    with_stage = _steps_with_stage(run) if missing_steps else set()
    for loop, number in missing_steps:
        reason = "has no folder" if number in with_stage else "no stage ran in it, so there is nothing to capture"
        report.problems.append(f"step {runs.label(number, loop)} was asked for and executed, but {reason}")
    if not requested_steps and steps.any and not open_spans.going_on:
        report.problems.append("the run executed none of the steps that AUTOPROF_STEPS asks for")


def _steps_with_stage(run: runs.Run) -> set[int | None]:
    files = journal.journals(run.path)
    return {span.step for file in files for span in journal.search(file, (b'"kind":"stage"',))}


def _open_steps(open_spans: OpenSpans) -> list[str]:
    """Return a list with a text about the open step: its number, and the time since it began.

    If several steps are open, the text is about the latest step. If no step is open, the list is empty.
    """
    steps = sorted((row for row in open_spans.rows()[0] if row.kind == "step"), key=lambda row: row.start_ns)
    loops = {span.start_ns: loop_of(span) for _, _, span in open_spans.aged() if span.kind == "step"}
    return [
        f"step {row.step if row.step is None else runs.label(row.step, loops[row.start_ns])} "
        f"{'has been' if open_until_now(row.state, open_spans.going_on) else 'was'} open for "
        f"{hang_state.open_for(row, open_spans.going_on)}"
        for row in steps[-1:]
    ]


def _check_begun(report: Report, run: runs.Run, open_spans: OpenSpans) -> None:
    """Add a problem if no step of the run has begun.

    If the run started recently, add a note instead, because the run may still be loading its model. If a finding has
    the duration and the place, add a note with the reason alone.
    """
    if _open_steps(open_spans):
        return
    if not open_spans.going_on:
        report.problems.append(f"no step was recorded: {_without_step(run)}")
        return
    age = open_spans.now_ns / 1e9 - run.info.started
    is_found = any(problem.startswith("no step has begun") for problem in report.problems)
    duration = "" if is_found else f" for {units.seconds(age)} since the run started"
    text = f"no step has begun{duration}: {_without_step(run)}"
    (report.problems if age >= hangs.STILL_S and not is_found else report.notes).append(text)


def _without_step(run: runs.Run) -> str:
    """Return the reason why no step of a run has ended."""
    states = run.processes
    if any(state.drives for state in states):
        return (
            "a step began, but its process exited before the step ended; add a hook with step.end or step.loop to the "
            "recipe"
        )
    fired = sorted({key for state in states for key, hook in state.hooks.items() if hook.called})
    failed = [key for key in fired if any(key in state.errors for state in states)]
    if failed:
        return f"a hook that fired has failed: {', '.join(failed)}"
    if fired:
        more_text = f" and {len(fired) - _MAX_FIRED} more" if len(fired) > _MAX_FIRED else ""
        return f"no hook that fired begins steps: {', '.join(fired[:_MAX_FIRED])}{more_text}; --all lists the hooks"
    return "no hook fired; --all lists the hooks"


def _check_control(report: Report, directory: RunDir) -> None:
    if layout.switched_off(directory):
        switch = f"; autoprof trigger {name_of(str(directory.path))} --on switches it on"
        is_running = report.facts["state"].startswith("running")
        report.notes.append(
            f"control/{layout.OFF}: autoprof was switched off in the run, so later steps were not recorded"
            f"{switch if is_running else ''}"
        )
    for name in requests.waiting(directory):
        report.notes.append(f"control/{name}: no step has begun since the request, or no trainer reads this folder")
    for name, became in requests.states(directory).items():
        if became.state == "refused":
            report.problems.append(f"control/{name}: the request was refused: {became.reason}")
        elif became.reason:
            report.notes.append(f"control/{name}: {became.reason}")
        elif not became.over and not report.facts["state"].startswith("running"):
            report.notes.append(f"control/{name}: the run ended before all requested steps had begun")


def _check_captures(report: Report, run: runs.Run) -> None:
    report.facts["captures"] = f"{len(run.captures)}, {units.size(run.bytes)}"
    untraced = Counter(capture.meta.reason for capture in run.captures if capture.untraced)
    report.facts["captures"] += "".join(f"; {count} without a trace, {reason}" for reason, count in untraced.items())
    for step in run.steps:
        for capture in [*step.captures, *step.merged]:
            if capture.state == UNFINISHED and run.state.startswith("running"):
                continue
            if capture.state != "complete":
                reason = capture.meta.reason or _CUT_OFF
                report.problems.append(f"step {step.label}, {capture.name}: {capture.state}, {reason}")
            elif capture.meta.reason == NOT_ANALYSED:
                report.notes.append(f"step {step.label}, {capture.name}: {NOT_ANALYSED}; run autoprof analyse")
    nsys_requested = "nsys" in run.info.settings.tool
    if nsys_requested and run.captures and all(capture.meta.tool != "nsys" for capture in run.captures):
        report.problems.append("AUTOPROF_TOOL asks for nsys, but no captured process ran under nsys")
    captures = [capture.name for step in run.steps for capture in step.captures]
    for part in RunDir(Path(run.path)).parts() if run.state != "running" else ():
        if not any(part.name.startswith(name) for name in captures):
            report.notes.append(f"{part.relative_to(run.path)}: {_CUT_OFF}")


def _check_survivors(report: Report, run: runs.Run) -> None:
    """Add a problem about processes that are running although the process that started the run is gone."""
    if not run.survivors:
        return
    ranks = [next((span for span in reversed(state.spans) if span.rank is not None), None) for state in run.survivors]
    names = [
        f"{hang_state.where(msgspec.structs.replace(rank, ids={}))} (pid {state.pid} on {state.host})"
        if rank is not None
        else f"pid {state.pid} on {state.host}"
        for state, rank in zip(run.survivors, ranks, strict=True)
    ]
    more_text = f" and {len(names) - _MAX_SURVIVORS} more" if len(names) > _MAX_SURVIVORS else ""
    count = units.count(len(names), "process is", "processes are")
    report.problems.append(
        f"{count} still running, although the process that started the run is gone: "
        f"{', '.join(names[:_MAX_SURVIVORS])}{more_text}; autoprof stacks {run.id} shows where they are"
    )


# Maximum number of running processes that are named.
_MAX_SURVIVORS = 8


def _check_end(report: Report, run: runs.Run) -> None:
    if run.state == UNFINISHED and not run.survivors:
        report.problems.append(
            "the process that started the run is gone without recording its end: it was killed by a signal, called "
            "os._exit or os.exec, or found the disk full; run.json is as it was at the start"
        )
    if run.state == runs.FAILED:
        report.problems.append(f"the process that started the run {run.outcome}; see its own output")


def devices(run: Run) -> tuple[list[str], list[str]]:
    """Return notes and problems about the traces without GPU activity, if their processes used a GPU.

    A trace gets a note if another trace of its process has GPU activity: then the stage did not use the GPU. Otherwise,
    the trace gets a problem.
    """
    captures = [
        (step, capture) for step in run.steps for capture in step.captures if capture.meta.device_events is not None
    ]
    with_activity = {_process(capture) for _, capture in captures if capture.meta.device_events}
    notes, problems = [], []
    for step, capture in captures:
        if not capture.meta.device_events:
            text = f"step {step.number}, {capture.name}: the trace has no GPU activity"
            if _process(capture) in with_activity:
                notes.append(f"{text}, but other traces of the process do: the GPU was idle")
            else:
                problems.append(f"{text}: {capture.meta.device_reason}")
    return notes, problems


def out_of_memory(directory: RunDir) -> list[str]:
    """Return a note for each memory snapshot in `oom/`."""
    notes = []
    for path in sorted(directory.oom.glob(f"*{META}")):
        meta = layout.read_json(path, OutOfMemoryMeta)
        place = f"in step {meta.step}, {meta.role} {meta.stage}, " if meta.step is not None else ""
        requested, free = units.size(meta.asked_bytes), units.size(meta.free_bytes)
        name = f"oom/{path.name.removesuffix(META)}{SNAPSHOT}"
        notes.append(f"{name}: CUDA ran out of memory {place}with {requested} requested, {free} free")
    return notes


def _process(capture: CaptureFile) -> tuple[object, object]:
    return capture.meta.host, capture.meta.pid
