"""`autoprof stacks`: asks each process of a run for its stacks, and groups equal stacks."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from autoprof.base import units
from autoprof.base.identity import HOST, host_name
from autoprof.base.redact import plain
from autoprof.cli import arguments, console, nodes, trigger
from autoprof.cli.console import complain
from autoprof.cli.documents import Lacking, StackGroup, Stacks
from autoprof.run import cluster
from autoprof.run.cluster import Gone
from autoprof.rundir import runs
from autoprof.rundir.records import STACKS, Frame, OpenSpan, ProcessStacks, Task, Thread, Why

# Kinds of spans that are work of a whole process. Spans of other kinds belong to single samples.
_WORK = ("step", "stage", "timer", "window")
# Paths of the files of Python's standard library, and of compiled code.
_LIBRARY = re.compile(r"/lib/python3\.\d+/(?!(site|dist)-packages/)|^<frozen |\.so(\.[0-9.]+)?$|/python3?(\.\d+)?$")
_MAX_LABEL = 50


class Member(NamedTuple):
    """A thread or task of a process, and the spans on which the thread or task works, outermost first."""

    process: ProcessStacks
    stack: Thread | Task
    spans: list[OpenSpan]

    @property
    def work(self) -> OpenSpan | None:
        """Return the member's stage, timer or window that began last, or else its step, if any."""
        work = [span for span in self.spans if span.kind in _WORK]
        return max(work, key=lambda span: (span.kind != "step", span.start_ns), default=None)

    @property
    def innermost(self) -> OpenSpan | None:
        """Return the span of a sample that began last, or else `work`."""
        samples = [span for span in self.spans if span.kind not in _WORK]
        return max(samples, key=lambda span: span.start_ns, default=self.work)


class Group(NamedTuple):
    """Threads or tasks with the same stack, in spans of the same kind and name."""

    members: list[Member]

    @property
    def frames(self) -> list[Frame]:
        return self.members[0].stack.frames

    @property
    def place(self) -> Frame | None:
        """Return the innermost Python function outside the standard library, or else the innermost function, if any."""
        frames = [frame for frame in self.frames if frame.file and not _LIBRARY.search(frame.file)]
        return (frames or self.frames or [None])[-1]  # type: ignore[list-item]

    @property
    def age_s(self) -> float | None:
        """Return the age of the oldest of the members' innermost spans, in seconds; None if they have no span."""
        ages = [age(member.process, span) for member in self.members if (span := member.innermost) is not None]
        return max(ages, default=None)

    @property
    def who(self) -> str:
        """Return the names of all members in one text: their ranks, such as `actor ranks 0-16,18-63`, or processes."""
        ranks: dict[str, set[int]] = {}
        other_names = []
        for member in self.members:
            work = member.work
            if work is not None and work.rank is not None and work.kind == "stage":
                ranks.setdefault(work.role, set()).add(work.rank)
            else:
                process = member.process
                title = units.short(process.process or "process", _MAX_LABEL)
                other_names.append(f"{title} ({process.host}-{process.pid})")
        names = [
            f"{role} rank{'s' if len(numbers) > 1 else ''} {units.ranges(sorted(numbers))}"
            for role, numbers in sorted(ranks.items())
        ]
        return ", ".join(names + several(other_names, 3))


def age(process: ProcessStacks, span: OpenSpan) -> float:
    """Return the seconds from the start of a span to the answer of its process, both on the clock of the process."""
    return max(0.0, (process.unix_ns - span.start_ns) / 1e9)


def several(names: Iterable[str], limit: int) -> list[str]:
    """Return the distinct names.

    If there are more than `limit` + 1 names, return the first `limit` names and a text with the number of other names.
    """
    distinct = list(dict.fromkeys(names))
    return distinct if len(distinct) <= limit + 1 else [*distinct[:limit], f"{len(distinct) - limit} more"]


def at_work(processes: Sequence[ProcessStacks]) -> list[Group]:
    """Return the groups of threads that work on a span, followed by the groups of the other main threads.

    In both parts, large groups come first.
    """
    all_groups = _group_threads(
        Member(process, thread, _spans(process, thread))
        for process in processes
        for thread in process.threads
        if thread.main or thread.spans
    )
    return sorted(all_groups, key=lambda group: not group.members[0].spans)


def beside(processes: Sequence[ProcessStacks]) -> list[Group]:
    """Return the groups of the threads that are not main threads and work on no span. Large groups come first."""
    return _group_threads(
        Member(process, thread, [])
        for process in processes
        for thread in process.threads
        if not thread.main and not thread.spans
    )


def tasks(processes: Sequence[ProcessStacks]) -> list[Group]:
    """Return the groups of asyncio's tasks. The groups of tasks that work on a span come first."""
    all_groups = _group_threads(
        Member(process, task, _spans(process, task)) for process in processes for task in process.tasks
    )
    return sorted(all_groups, key=lambda group: not group.members[0].spans)


def _spans(process: ProcessStacks, stack: Thread | Task) -> list[OpenSpan]:
    spans = [process.spans[index] for index in stack.spans if index < len(process.spans)]
    if not spans and isinstance(stack, Thread) and stack.main:
        # py-spy does not assign spans to threads. Without assigned spans, the main thread gets the process's spans.
        has_assigned_spans = any(thread.spans for thread in process.threads) or any(
            task.spans for task in process.tasks
        )
        spans = [] if has_assigned_spans else [span for span in process.spans if span.kind in _WORK]
    return sorted(spans, key=lambda span: span.start_ns)


def _group_threads(members: Iterable[Member]) -> list[Group]:
    groups: dict[object, Group] = {}
    for member in members:
        span = member.innermost
        span_name = (span.kind, span.name) if span is not None else None
        waits_on = member.stack.waits_on if isinstance(member.stack, Task) else ""
        wait_kind = waits_on if waits_on in ("", "its turn") else "waits"
        # Compare the names of functions without their classes, because py-spy does not give the classes.
        stack = tuple((frame.function.rpartition(".")[2], frame.file, frame.line) for frame in member.stack.frames)
        groups.setdefault((stack, span_name, wait_kind), Group([])).members.append(member)
    return sorted(groups.values(), key=lambda group: (-len(group.members), -(group.age_s or 0)))


class Answer(Struct, frozen=True, kw_only=True):
    """The stacks of the processes on one node, as the node returned them.

    Attributes:
        host: The name of the host.
        folder: The folder on the host in which each process writes a file with its stacks.
        files: The content of each file, by file name.
        absent: The processes that wrote no file.
        py_spy: The reason why py-spy could not read a process; empty if it could.
        problem: The error that prevented the node from asking its processes; empty without an error.
    """

    host: str
    folder: str
    files: dict[str, bytes] = {}
    absent: list[Lacking] = []
    py_spy: str = ""
    problem: str = ""


# Seconds to wait for a node in addition to the wait for its processes, because Ray may have to start a worker there.
_NODE_EXTRA_S = 60.0


def ask_run(ray: Any, run: str, name: str, why: bytes, wait_s: float, native: bool) -> tuple[str, list[Answer]]:
    """Ask the processes on all nodes of a run for their stacks. Return the id of the run, and the answers of the nodes.

    Args:
        ray: The module `ray`, connected to a cluster.
        run: The id of a run, the beginning of an id, or `latest` for this user's latest running run.
        name: The name of the folder for the answers.
        why: The content of the file `why.json` in this folder.
        wait_s: Seconds to wait for the processes.
        native: True to include C functions.

    Raises:
        NotFound: No run in the cluster matches, or several do.
        Gone: All nodes of the run are gone.
    """
    registered = trigger.find_in_ray(ray, run).run
    alive = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    directories = {registered.node: registered.directory}
    answers = []
    asked_disks = set()
    for member in cluster.nodes_of_run(registered.id):
        # Ask only one node per disk, because several nodes on one machine may share the directory of the run.
        disk = member.disk or member.id
        if disk in asked_disks and member.id != registered.node:
            continue
        asked_disks.add(disk)
        if member.id in alive:
            directories[member.id] = member.directory
        else:
            answers.append(Answer(host=member.host, folder=member.directory, problem="the node has died"))
    calls = {
        node_id: ("ask", directory, name, why, wait_s, native, False)
        for node_id, directory in directories.items()
        if node_id in alive
    }
    if not calls:
        raise cluster.Gone(f"all nodes of run {registered.id} are gone")
    task = cluster.shipped(ray, nodes.__name__)
    for node_id, answer in trigger.ask_nodes(ray, task, "autoprof_stacks", calls, wait_s + _NODE_EXTRA_S).items():
        error = answer  # the exception, if the node has died since
        if not isinstance(answer, Exception):
            try:
                answers.append(msgspec.convert(answer, Answer))
                continue
            except msgspec.ValidationError as invalid:  # the node has another release of autoprof
                error = invalid
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        folder = f"{directories[node_id]}/{STACKS}/{name}"
        problem = f"the node did not answer: {first_line[:200]}"
        answers.append(Answer(host=host_name(alive[node_id]), folder=folder, problem=problem))
    return registered.id, answers


# Maximum numbers in the text output. The JSON document and the files have no limits.
_MAX_GROUPS, _MAX_TASK_GROUPS, _MAX_OTHERS, _MAX_ABSENT, _MAX_WAITS = 24, 12, 10, 20, 5
_MAX_FRAMES = 12


def page_lines(processes: Sequence[ProcessStacks], absent: Sequence[Lacking]) -> Iterator[str]:
    """Yield the output lines about the stacks, the open spans and the processes without a stack."""
    thread_groups = at_work(processes)
    yield from _group_lines("", thread_groups, _MAX_GROUPS, "process", "processes")
    task_groups = tasks(processes)
    yield from _group_lines("tasks of asyncio", task_groups, _MAX_TASK_GROUPS, "task", "tasks")
    yield from _open_span_lines(processes)
    yield from _other_lines(beside(processes))
    yield from _absent_lines(absent)


def _group_lines(title: str, all_groups: Sequence[Group], limit: int, noun: str, plural: str) -> Iterator[str]:
    if title and all_groups:
        yield from ("", f"{title}:")
    for group in all_groups[:limit]:
        yield ""
        yield heading(group, noun, plural)
        frames = group.frames
        if len(frames) > _MAX_FRAMES:
            yield f"    ... {units.count(len(frames) - _MAX_FRAMES, 'outer function')}"
        yield from (f"    {place(frame)}" for frame in frames[-_MAX_FRAMES:])
    if len(all_groups) > limit:
        more_count = sum(len(group.members) for group in all_groups[limit:])
        yield from (
            "",
            f"... {units.count(more_count, noun, plural)} more, with {len(all_groups) - limit} other stacks",
        )


def heading(group: Group, noun: str, plural: str) -> str:
    """Return the output line above the stack of a group.

    Example: `2 processes in all_reduce (...) of update_actor, step 41, for 9 min: actor ranks 0-1`.

    `noun` and `plural` are the word for the members of the group, such as process and processes.
    """
    parts = [units.count(len(group.members), noun, plural)]
    if (frame := group.place) is not None:
        parts.append(f"in {frame.function} ({_file(frame)})")
    span = group.members[0].innermost
    if span is not None and span.kind != "step":
        parts.append(f"of {span.name}")
    text = " ".join(parts)
    steps = sorted({span.step for member in group.members for span in member.spans if span.step is not None})
    if steps:
        text += f", step {units.ranges(steps)}"
    if group.age_s is not None:
        text += f", for {units.seconds(group.age_s)}"
    waits = {member.stack.waits_on for member in group.members if isinstance(member.stack, Task)}
    if waits - {""}:
        text += f", waits on {', '.join(several(sorted(waits - {''}), 3))}"
    return f"{text}: {group.who}"


def place(frame: Frame) -> str:
    """Return the output line for a function in a stack: the file, the line number and the name of the function."""
    return f"{_file(frame)} {frame.function}" if frame.file else frame.function


def _file(frame: Frame) -> str:
    """Return the last two parts of the path of a frame's file, and the line number, such as `run/end.py:12`."""
    return f"{'/'.join(frame.file.split('/')[-2:])}:{frame.line}"


def _open_span_lines(processes: Sequence[ProcessStacks]) -> Iterator[str]:
    """Yield output lines about the open samples, turns and tool calls, by kind and name. The oldest come first."""
    by_name: dict[tuple[str, str], list[tuple[float, OpenSpan, ProcessStacks]]] = {}
    for process in processes:
        for span in process.spans:
            if span.kind not in _WORK:
                by_name.setdefault((span.kind, span.name), []).append((age(process, span), span, process))
    if by_name:
        yield from ("", "open:")
    for (kind, name), spans in sorted(by_name.items(), key=lambda item: -max(age_s for age_s, _, _ in item[1])):
        spans.sort(key=lambda item: -item[0])
        title = f"{kind} {name}" if name != kind else kind
        yield f"    {title}: {len(spans)}, the oldest for {units.seconds(spans[0][0])}"
        for age_s, span, process in spans[:_MAX_WAITS]:
            ids = " ".join(f"{key}={value}" for key, value in span.ids.items())
            step = f"step {span.step}" if span.step is not None else ""
            text = ", ".join(filter(None, [ids, step, f"for {units.seconds(age_s)}"]))
            yield f"        {text} ({process.host}-{process.pid})"


def _other_lines(all_groups: Sequence[Group]) -> Iterator[str]:
    """Yield an output line for each group of threads without a span: their number, innermost function and names."""
    if all_groups:
        yield from ("", "other threads:")
    for group in all_groups[:_MAX_OTHERS]:
        frame = group.place
        names = ", ".join(several([member.stack.name or "without a name" for member in group.members], 2))
        yield f"    {len(group.members)} in {place(frame) if frame is not None else 'nothing'}: {names}"
    if len(all_groups) > _MAX_OTHERS:
        more_count = sum(len(group.members) for group in all_groups[_MAX_OTHERS:])
        yield f"    ... {units.count(more_count, 'thread')} more, with {len(all_groups) - _MAX_OTHERS} other stacks"


def _absent_lines(absent: Sequence[Lacking]) -> Iterator[str]:
    for process in absent[:_MAX_ABSENT]:
        host_pid = f"{process.host}-{process.pid}"
        name = f"{process.process} ({host_pid})" if process.process else host_pid
        if process.state == "gone":
            latest = max(process.spans, key=lambda span: span.start_ns, default=None)
            step = f" of step {latest.step}" if latest is not None and latest.step is not None else ""
            last_span = f"; it was in {latest.name}{step}" if latest is not None else ""
            text = f"gone: {name}{last_span}"
        elif process.state == "elsewhere":
            where = "on another host or in another container"
            text = f"no answer: {name}, which is {where}; --ray reaches other hosts if the run is in a Ray cluster"
        else:
            text = f"no answer: {name}: {process.reason}"
        yield from (("", text) if process is absent[0] else (text,))
    if len(absent) > _MAX_ABSENT:
        yield f"... {units.count(len(absent) - _MAX_ABSENT, 'process', 'processes')} more without an answer"


# Default of `--wait` in seconds. Processes check every ten seconds if they are asked for their stacks.
_WAIT_S = 15.0
_INSTALL = "pip install 'autoprof-rl[stacks]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    text = "a running run, as for ls (default: the latest one)"
    parser.add_argument("name", nargs="?", metavar="RUN", default=runs.LATEST, help=text)
    parser.add_argument(
        "--ray", metavar="ADDRESS", help="ask all nodes through Ray: auto, or an address as ray.init takes it"
    )
    parser.add_argument(
        "--native",
        action="store_true",
        help="also show C functions, with py-spy, which stops each process for a moment",
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
    # Because of the milliseconds, two commands in the same second get separate folders.
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now / 1e9))
    name = f"{stamp}-{now % 1_000_000_000 // 1_000_000:03d}"
    why = msgspec.json.encode(Why(host=HOST, pid=os.getpid(), unix_ns=now, reason="autoprof stacks was called"))
    question = (name, why + b"\n", parsed.wait, parsed.native)
    try:
        if parsed.ray is None:
            running = _running_run(parsed)
            with _waiting(parsed.wait):
                answer = nodes.ask(running.path, *question, others=True)
            return _print_answers(running.id, [msgspec.convert(answer, Answer)], parsed)
        with arguments.cluster(parsed.ray, "--ray") as ray:
            with _waiting(parsed.wait):
                run_id, answers = ask_run(ray, parsed.name, *question)
            return _print_answers(run_id, answers, parsed)
    except (Gone, cluster.Unreachable) as error:
        return arguments.complain_about_cluster("stacks", error)


@contextlib.contextmanager
def _waiting(seconds: float) -> Iterator[None]:
    """If stderr is a terminal, show that the command is waiting for processes until the `with` block ends."""
    if not sys.stderr.isatty():
        yield
        return
    with console.lines(0, keep_stdout=True) as show:
        show(f"waiting for the processes, up to {seconds:g} s", 0)
        yield


def _running_run(parsed: argparse.Namespace) -> runs.Run:
    """Return the run that the argument RUN names. For `latest`, return the latest run that is running.

    Raises:
        NotFound: No run matches, or the run is not running.
    """
    chosen_run = arguments.find_run(parsed)
    if parsed.name == runs.LATEST and not chosen_run.is_running:
        # An earlier run may still be running.
        for run in reversed(runs.runs(arguments.parent(parsed))):
            if run.is_running:
                return run
    if not chosen_run.is_running:
        examine = f"autoprof doctor {chosen_run.id} shows how it ended, and processes that are still running"
        raise runs.NotFound(f"run {chosen_run.id} is not running: its state is {chosen_run.outcome}; {examine}")
    return chosen_run


def _print_answers(run_id: str, answers: list[Answer], parsed: argparse.Namespace) -> int:
    """Print the nodes' answers, and return the exit status."""
    problems = [f"{answer.host}: {answer.folder}: {answer.problem}" for answer in answers if answer.problem]
    # Nodes that share a disk return the same files.
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
                groups=[
                    StackGroup(
                        heading=heading(group, "process", "processes"),
                        processes=[f"{member.process.host}-{member.process.pid}" for member in group.members],
                        frames=group.frames,
                    )
                    for group in at_work(processes)
                ],
                absent=absent,
                problems=problems,
            )
        )
    else:
        read_by_spy = sum(process.by == "py-spy" for process in processes)
        answered = units.count(len(processes) - read_by_spy, "process", "processes")
        by_spy = f", py-spy read {read_by_spy}" if read_by_spy else ""
        print(plain(f"run {run_id}: {answered} answered{by_spy}, {len(absent)} did not"))
        for line in page_lines(processes, absent):
            print(plain(line))
        print()
        for folder in folders:
            print(plain(f"files: {folder}"))
        for line in problems:
            complain(f"stacks: {line}", 0)
    return 0 if processes else 1


def _absent(answers: list[Answer], files: Container[str]) -> list[Lacking]:
    """Return the processes of which no node has a file. Each process comes once, with the state from its own host.

    A host can't see the processes in other containers on the same machine. The state of such a process is `elsewhere`.
    """
    asked_hosts = {answer.host for answer in answers if not answer.problem}
    absent = {}
    for answer in answers:
        for process in answer.absent:
            name = f"{process.host}-{process.pid}.json"
            is_known = process.state != "elsewhere" or process.host == answer.host or process.host not in asked_hosts
            if name not in files and is_known:
                absent[name] = process
    return list(absent.values())


def _spy_problems(answers: list[Answer], native: bool) -> list[str]:
    """Return an output line for each reason why py-spy could not read a process.

    Nodes on which py-spy was not needed are left out. py-spy is needed for `--native`, and for silent processes.
    """
    hosts_by_reason: dict[str, list[str]] = {}
    for answer in answers:
        silent = any(process.state == "running" for process in answer.absent)
        if answer.py_spy and (silent or native):
            hosts_by_reason.setdefault(answer.py_spy, []).append(answer.host)
    lines = []
    for reason, hosts in hosts_by_reason.items():
        if reason == nodes.PY_SPY_MISSING:
            text = f"there is no py-spy, which sees processes that do not answer: {_INSTALL}"
        elif reason == nodes.PY_SPY_PERMISSION:
            text = (
                "py-spy may not look into the processes: call autoprof stacks as root, or as their user in a container "
                "with the capability SYS_PTRACE"
            )
        else:
            text = f"py-spy could not read a process: {reason}"
        lines.append(f"{', '.join(several(hosts, 3))}: {text}")
    return lines
