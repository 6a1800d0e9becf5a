"""Results of `autoprof recipes --try`, from the run's files: the time without a stage, and the values of samples."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from autoprof.base import units
from autoprof.base.intervals import Union
from autoprof.behaviours.spans import CallSpan
from autoprof.hooks.recipe import BoundHook
from autoprof.run import runtime, try_stacks
from autoprof.rundir.journal import SpanReader, journals
from autoprof.rundir.records import Line

NO_STAGE = "no stage hook: this recipe makes no traces"
# Behaviours with which a recipe makes traces.
_TRACES = (
    *("stage", "stage.begin", "rollout.around", "rollout.http", "rpc.server"),
    *("vllm.server", "vllm.engine", "vllm.worker", "vllm.offline-whole", "sglang.server", "sglang.set-up"),
)
_MAX_FUNCTIONS = 5


class Uncovered(Struct):
    """The time of the steps that no stage covers."""

    seconds: float  # The seconds of all steps in which no stage ran.
    steps_s: float  # The seconds of all steps.
    functions: dict[str, float]  # The longest functions in this time: their seconds, by `module:function`.


class ReadValue(Struct):
    """A value that a hook for samples reads from its calls."""

    hook: str  # The name of the hook.
    value: str  # The option and the name of the value, such as `ids.prompt`.
    path: str  # The path in the recipe.
    times: int  # The number of calls in which the path led to a value.
    calls: int  # The number of calls.
    example: str  # The last value; empty if no call had one.


def makes_traces(hooks: Iterable[BoundHook]) -> bool:
    """Return True if one of the hooks makes traces."""
    return any(hook.hook.behaviour in _TRACES for hook in hooks)


class JournalSpans(NamedTuple):
    """The spans of one journal: the directory of its run, the process that wrote it, and the spans that have ended."""

    directory: Path
    process: str
    spans: list[Line]


def read_spans(directories: Iterable[Path]) -> list[JournalSpans]:
    """Return the spans of all journals of some runs."""
    found = []
    for directory in directories:
        reader = SpanReader()
        for journal in journals(directory):
            process = Path(journal.name).name.removesuffix(".jsonl")
            found.append(JournalSpans(directory, process, list(reader.spans(journal))))
    return found


def read_values(hooks: Iterable[BoundHook], spans: Sequence[Line]) -> list[ReadValue]:
    """Return the values that the hooks for samples, turns, tools, rewards and requests have read."""
    values = []
    for hook in hooks:
        behaviour = hook.behaviour
        if not isinstance(behaviour, CallSpan) or behaviour.kind == "stage":
            continue
        own_spans = [
            line
            for line in spans
            if line.kind == behaviour.kind and (not isinstance(behaviour.stage, str) or line.name == behaviour.stage)
        ]
        for option in ("ids", "counts", "result_counts"):
            for name, path in getattr(behaviour, option).items():
                entries = [line.ids if option == "ids" else line.counts for line in own_spans]
                found = [entry[name] for entry in entries if entry.get(name) is not None]
                example = str(found[-1]) if found else ""
                value = f"{option}.{name}"
                values.append(ReadValue(hook.hook.name, value, path, len(found), len(own_spans), example))
    return values


def uncovered(all_spans: Iterable[JournalSpans]) -> Uncovered | None:
    """Return the time of the steps that no stage covers, or None if no step has ended."""
    steps_ns = uncovered_ns = 0
    functions: Counter[str] = Counter()
    for directory, process, spans in all_spans:
        steps = Union(sorted((line.start_ns, line.end_ns) for line in spans if line.kind == "step"))
        stages = Union(sorted((line.start_ns, line.end_ns) for line in spans if line.kind == "stage"))
        gaps = Union(gap for start, end in steps.pieces() for gap in stages.without(start, end))
        steps_ns += steps.length()
        uncovered_ns += gaps.length()
        functions.update(_functions(directory, process, gaps))
    if not steps_ns:
        return None
    longest = {name: count * try_stacks.INTERVAL_S for name, count in functions.most_common(_MAX_FUNCTIONS)}
    return Uncovered(uncovered_ns / 1e9, steps_ns / 1e9, longest)


def _functions(directory: Path, process: str, gaps: Union) -> Counter[str]:
    """Return the functions on the stack while a step, but no stage, was running, with the number of samples.

    Functions that contain the steps or the stages are left out: they are also on the stack at other times, or in nearly
    every sample but rarely the innermost function. No rule needs exact counts: the time of a sample is a little later
    than its stack, so a few samples are on the wrong side.
    """
    inside: Counter[str] = Counter()
    innermost: Counter[str] = Counter()
    outside: Counter[str] = Counter()
    for path in (directory / runtime.CALLS).glob(f"{process}.*{try_stacks.ENDING}"):
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                moment_ns, names = json.loads(text)
            except ValueError:  # the process ended while the line was written
                continue
            if gaps.within(moment_ns, moment_ns + 1):
                inside.update(set(names))
                innermost.update(names[:1])
            else:
                outside.update(set(names))
    samples = innermost.total()
    kept = {
        name: count
        for name, count in inside.items()
        if outside[name] <= count / 10 and (count < samples * 0.9 or innermost[name] > count / 2)
    }
    return Counter(kept) or innermost


def uncovered_text(time: Uncovered) -> list[str]:
    """Return output lines about the time of the steps that no stage covers."""
    share = time.seconds / time.steps_s
    lines = [f"no stage ran in {share:.0%} of the steps' time, {units.seconds(time.seconds)}"]
    return lines + [f"  {units.seconds(seconds)} in {name}" for name, seconds in time.functions.items()]
