"""`autoprof stacks`: asks each process of a run for its stacks, and shows equal stacks together."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Container, Iterator, Sequence

import msgspec

from autoprof.base import units
from autoprof.base.identity import HOST
from autoprof.base.redact import plain
from autoprof.cli import arguments, console
from autoprof.cli.console import complain
from autoprof.cli.documents import Lacking, StackGroup, Stacks
from autoprof.cli.stacks import groups, node
from autoprof.cli.stacks.groups import Group
from autoprof.cli.stacks.node import Absent, Answer
from autoprof.run import cluster
from autoprof.run.cluster import Gone
from autoprof.rundir import runs
from autoprof.rundir.records import Frame, OpenSpan, ProcessStacks, Task, Why

# So much of each is shown; JSON and the files have all.
_GROUPS, _TASK_GROUPS, _OTHERS, _ABSENT, _WAITS = 24, 12, 10, 20, 5
_DEEP = 12


def page_lines(processes: Sequence[ProcessStacks], absent: Sequence[Absent]) -> Iterator[str]:
    """Yield the lines of the page."""
    working = groups.at_work(processes)
    yield from _shown("", working, _GROUPS, "process", "processes")
    waiting = groups.tasks(processes)
    yield from _shown("tasks of asyncio", waiting, _TASK_GROUPS, "task", "tasks")
    yield from _waits(processes)
    yield from _others(groups.beside(processes))
    yield from _absent_lines(absent)


def _shown(title: str, found: Sequence[Group], most: int, thing: str, things: str) -> Iterator[str]:
    if title and found:
        yield from ("", f"{title}:")
    for group in found[:most]:
        yield ""
        yield heading(group, thing, things)
        frames = group.frames
        if len(frames) > _DEEP:
            yield f"    ... {units.count(len(frames) - _DEEP, 'outer function')}"
        yield from (f"    {place(frame)}" for frame in frames[-_DEEP:])
    if len(found) > most:
        rest = sum(len(group.members) for group in found[most:])
        yield from ("", f"... {units.count(rest, thing, things)} more, with {len(found) - most} other stacks")


def heading(group: Group, thing: str, things: str) -> str:
    """Return what a group does in a line: `62 processes in all_reduce (...) of update_actor, step 41, since 12 min`."""
    parts = [units.count(len(group.members), thing, things)]
    if (frame := group.place) is not None:
        parts.append(f"in {frame.function} ({_file(frame)})")
    span = group.members[0].innermost
    if span is not None and span.kind != "step":
        parts.append(f"of {span.name}")
    said = " ".join(parts)
    steps = sorted({span.step for member in group.members for span in member.spans if span.step is not None})
    if steps:
        said += f", step {units.ranges(steps)}"
    if group.since_s is not None:
        said += f", since {units.seconds(group.since_s)}"
    waits = {member.stack.waits_on for member in group.members if isinstance(member.stack, Task)}
    if waits - {""}:
        said += f", waits on {', '.join(groups.several(sorted(waits - {''}), 3))}"
    return f"{said}: {group.who}"


def place(frame: Frame) -> str:
    """Return a function as a line of a stack has it."""
    return f"{_file(frame)} {frame.function}" if frame.file else frame.function


def _file(frame: Frame) -> str:
    """Return a file's last two names, and the line."""
    return f"{'/'.join(frame.file.split('/')[-2:])}:{frame.line}"


def _waits(processes: Sequence[ProcessStacks]) -> Iterator[str]:
    """Yield which samples, turns and tools are open, by their names, the oldest first."""
    found: dict[tuple[str, str], list[tuple[float, OpenSpan, ProcessStacks]]] = {}
    for process in processes:
        for span in process.spans:
            if span.kind not in ("step", "stage", "timer", "window"):
                told = groups.age(process, span), span, process
                found.setdefault((span.kind, span.name), []).append(told)
    if found:
        yield from ("", "open:")
    for (kind, name), spans in sorted(found.items(), key=lambda each: -max(told[0] for told in each[1])):
        spans.sort(key=lambda told: -told[0])
        what = f"{kind} {name}" if name != kind else kind
        yield f"    {what}: {len(spans)}, the oldest since {units.seconds(spans[0][0])}"
        for seconds, span, process in spans[:_WAITS]:
            ids = " ".join(f"{key}={value}" for key, value in span.ids.items())
            step = f"step {span.step}" if span.step is not None else ""
            said = ", ".join(filter(None, [ids, step, f"since {units.seconds(seconds)}"]))
            yield f"        {said} ({process.host}-{process.pid})"


def _others(found: Sequence[Group]) -> Iterator[str]:
    """Yield a line for each stack of threads that work on nothing that autoprof knows."""
    if found:
        yield from ("", "other threads:")
    for group in found[:_OTHERS]:
        frame = group.place
        names = ", ".join(groups.several([member.stack.name or "without a name" for member in group.members], 2))
        yield f"    {len(group.members)} in {place(frame) if frame is not None else 'nothing'}: {names}"
    if len(found) > _OTHERS:
        rest = sum(len(group.members) for group in found[_OTHERS:])
        yield f"    ... {units.count(rest, 'thread')} more, with {len(found) - _OTHERS} other stacks"


def _absent_lines(absent: Sequence[Absent]) -> Iterator[str]:
    for each in absent[:_ABSENT]:
        name = f"{each.process} ({each.host}-{each.pid})" if each.process else f"{each.host}-{each.pid}"
        if each.state == "gone":
            inner = max(each.spans, key=lambda span: span.start_ns, default=None)
            step = f" of step {inner.step}" if inner is not None and inner.step is not None else ""
            was = f"; it was in {inner.name}{step}" if inner is not None else ""
            text = f"gone: {name}{was}"
        elif each.state == "elsewhere":
            where = "on another host or in another container"
            text = f"no answer: {name}, which is {where}; --ray reaches other hosts if the run is in a Ray cluster"
        else:
            text = f"no answer: {name}: {each.reason}"
        yield from (("", text) if each is absent[0] else (text,))
    if len(absent) > _ABSENT:
        yield f"... {units.count(len(absent) - _ABSENT, 'process', 'processes')} more without an answer"


# A process looks every ten seconds for who asks.
_WAIT_S = 15.0
_INSTALL = "pip install 'autoprof-rl[stacks]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    text = "a run that is going on, as for ls (default: the latest one)"
    parser.add_argument("name", nargs="?", metavar="RUN", default=runs.LATEST, help=text)
    parser.add_argument(
        "--ray", metavar="ADDRESS", help="ask all nodes through Ray: auto, or an address as ray.init takes it"
    )
    parser.add_argument(
        "--native",
        action="store_true",
        help="show functions in C too, by py-spy, which stops each process for a moment",
    )
    parser.add_argument(
        "--wait", type=float, default=_WAIT_S, metavar="S", help=f"seconds to wait for answers (default: {_WAIT_S:g})"
    )
    arguments.add_dir(parser)
    arguments.add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if not 0 <= parsed.wait <= 3600:
        return complain(f"stacks: --wait {parsed.wait:g}: it takes 0 to 3600 seconds", 2)
    now = time.time_ns()
    # Two who ask in one second have folders of their own.
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now / 1e9))
    name = f"{stamp}-{now % 1_000_000_000 // 1_000_000:03d}"
    why = msgspec.json.encode(Why(host=HOST, pid=os.getpid(), unix_ns=now, reason="autoprof stacks was called"))
    question = node.Question(name, why + b"\n", parsed.wait, parsed.native)
    try:
        if parsed.ray is None:
            found = _going_on(parsed)
            with _waiting(parsed.wait):
                said = node.asker()(found.path, name, question.why, parsed.wait, parsed.native, True)
            return _tell(found.id, [msgspec.convert(said, Answer)], parsed)
        with arguments.cluster(parsed.ray, "--ray") as ray:
            with _waiting(parsed.wait):
                run_id, answers = node.ask_nodes(ray, parsed.name, question)
            return _tell(run_id, answers, parsed)
    except cluster.Lost as error:
        complain(f"stacks: {error}", 1)
        sys.stdout.flush()
        # What Ray does at exit would wait for its head.
        os._exit(1)
    except cluster.Unreachable as error:
        return complain(f"stacks: --ray: {error}", 1)
    except Gone as error:
        return complain(f"stacks: {error}", 1)


@contextlib.contextmanager
def _waiting(seconds: float) -> Iterator[None]:
    """Show on a terminal that processes are waited for."""
    if not sys.stderr.isatty():
        yield
        return
    with console.lines(0, keep_stdout=True) as show:
        show(f"waiting for the processes, up to {seconds:g} s", 0)
        yield


def _going_on(parsed: argparse.Namespace) -> runs.Run:
    """Find the run.

    Raises:
        NotFound: There is none that goes on.
    """
    found = arguments.find_run(parsed)
    if parsed.name == runs.LATEST and not found.state.startswith("running"):
        # Another one may have begun later and be over.
        for each in reversed(runs.runs(arguments.parent(parsed))):
            if each.state.startswith("running"):
                return each
    if not found.state.startswith("running"):
        raise runs.NotFound(f"run {found.id} is not going on: its state is {found.outcome}")
    return found


def _tell(run_id: str, answers: list[Answer], parsed: argparse.Namespace) -> int:
    """Show what the nodes have answered, and return the exit status."""
    problems = [f"{answer.host}: {answer.folder}: {answer.problem}" for answer in answers if answer.problem]
    # Nodes that share a disk see one another's files.
    files = {file: (answer, content) for answer in answers for file, content in answer.files.items()}
    processes = []
    for file, (answer, content) in sorted(files.items()):
        try:
            processes.append(msgspec.json.decode(content, type=ProcessStacks))
        except (msgspec.DecodeError, UnicodeDecodeError):
            problems.append(f"{answer.host}: {answer.folder}/{file} can't be read")
    absent = _absent(answers, files)
    problems += _spy_problems(answers, parsed.native)
    folders = list(dict.fromkeys(f"{answer.host}:{answer.folder}" for answer in answers if not answer.problem))
    if parsed.json:
        console.print_json(
            Stacks(
                run=run_id,
                folders=folders,
                processes=processes,
                groups=[_described(group) for group in groups.at_work(processes)],
                absent=[
                    Lacking(
                        host=each.host,
                        pid=each.pid,
                        process=each.process,
                        state=each.state,
                        reason=each.reason,
                        spans=each.spans,
                    )
                    for each in absent
                ],
                problems=problems,
            )
        )
    else:
        seen = sum(each.by == "py-spy" for each in processes)
        asked = units.count(len(processes) - seen, "process", "processes")
        by_spy = f", py-spy saw {seen}" if seen else ""
        print(plain(f"run {run_id}: {asked} answered{by_spy}, {len(absent)} did not"))
        for line in page_lines(processes, absent):
            print(plain(line))
        print()
        for folder in folders:
            print(plain(f"files: {folder}"))
        for line in problems:
            complain(f"stacks: {line}", 0)
    return 0 if processes else 1


def _absent(answers: list[Answer], files: Container[str]) -> list[Absent]:
    """Return the processes of which no node has a file, each once, as its own host says.

    A host can't see the processes of other containers on it: they stay `elsewhere`.
    """
    asked = {answer.host for answer in answers if not answer.problem}
    found = {}
    for answer in answers:
        for each in answer.absent:
            name = f"{each.host}-{each.pid}.json"
            known = each.state != "elsewhere" or each.host == answer.host or each.host not in asked
            if name not in files and known:
                found[name] = each
    return list(found.values())


def _described(group: groups.Group) -> StackGroup:
    return StackGroup(
        heading=heading(group, "process", "processes"),
        processes=[f"{member.process.host}-{member.process.pid}" for member in group.members],
        frames=group.frames,
    )


def _spy_problems(answers: list[Answer], native: bool) -> list[str]:
    """Return a line on py-spy for each reason why it was missed."""
    missed: dict[str, list[str]] = {}
    for answer in answers:
        silent = any(each.state == "running" for each in answer.absent)
        if answer.py_spy and (silent or native):
            missed.setdefault(answer.py_spy, []).append(answer.host)
    lines = []
    for why, hosts in missed.items():
        where = ", ".join(groups.several(hosts, 3))
        if why == node.PY_SPY_MISSING:
            what = f"there is no py-spy, which sees processes that do not answer: {_INSTALL}"
        elif why == node.PY_SPY_PERMISSION:
            what = (
                "py-spy may not look into the processes: call autoprof stacks as root, or as their user in a container "
                "with the capability SYS_PTRACE"
            )
        else:
            what = f"py-spy could not read a process: {why}"
        lines.append(f"{where}: {what}")
    return lines
