"""`autoprof stacks`: asks each process of a run where it stands, and shows equal stacks together."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Container, Iterator

import msgspec

from autoprof.base import identity, units
from autoprof.base.redact import plain
from autoprof.cli import arguments, console
from autoprof.cli.console import complain
from autoprof.cli.documents import Lacking, StackGroup, Stacks
from autoprof.cli.stacks import groups, in_ray, node, page, py_spy
from autoprof.cli.stacks.answer import Absent, Answer
from autoprof.run.cluster import connect
from autoprof.run.cluster.connect import Gone
from autoprof.rundir import runs
from autoprof.rundir.stacks import ProcessStacks, Why

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
    why = msgspec.json.encode(
        Why(host=identity.HOST, pid=os.getpid(), unix_ns=now, reason="autoprof stacks was called")
    )
    question = in_ray.Question(name, why + b"\n", parsed.wait, parsed.native)
    try:
        if parsed.ray is None:
            found = _going_on(parsed)
            with _waiting(parsed.wait):
                said = node.asker()(found.path, name, question.why, parsed.wait, parsed.native, True)
            return _tell(found.id, [msgspec.convert(said, Answer)], parsed)
        with arguments.cluster(parsed.ray, "--ray") as ray:
            with _waiting(parsed.wait):
                run_id, answers = in_ray.ask(ray, parsed.name, question)
            return _tell(run_id, answers, parsed)
    except connect.Lost as error:
        complain(f"stacks: {error}", 1)
        sys.stdout.flush()
        # What Ray does at exit would wait for its head.
        os._exit(1)
    except connect.Unreachable as error:
        return complain(f"stacks: --ray: {error}", 1)
    except Gone as error:
        return complain(f"stacks: {error}", 1)


@contextlib.contextmanager
def _waiting(seconds: float) -> Iterator[None]:
    """Show on a terminal that processes are waited for."""
    if not sys.stderr.isatty():
        yield
        return
    with console.lines(0, aside=True) as show:
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
        for line in page.lines(processes, absent):
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
        heading=page.heading(group, "process", "processes"),
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
        if why == py_spy.MISSING:
            what = f"there is no py-spy, which sees processes that do not answer: {_INSTALL}"
        elif why == py_spy.PERMISSION:
            what = (
                "py-spy may not look into the processes: call autoprof stacks as root, or as their user in a container "
                "with the capability SYS_PTRACE"
            )
        else:
            what = f"py-spy could not read a process: {why}"
        lines.append(f"{where}: {what}")
    return lines
