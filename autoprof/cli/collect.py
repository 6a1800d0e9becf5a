"""`autoprof collect`: brings together the parts of a run that its nodes have on disks of their own."""

from __future__ import annotations

import argparse
import contextlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from autoprof.base import units
from autoprof.base.redact import is_url, plain
from autoprof.base.redact import url as shown
from autoprof.cli import arguments, console
from autoprof.cli.console import complain
from autoprof.cli.documents import Collected
from autoprof.run import cluster
from autoprof.run.collect import gather
from autoprof.run.collect.fetch import Patience
from autoprof.run.collect.gather import Busy
from autoprof.run.collect.upload import NoTarget, Sending, lacks
from autoprof.rundir import decoder, processes, runs
from autoprof.rundir.file_names import COLLECTED, RUN
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import CollectedFile, RunFile

_NO_CLUSTER = "no Ray cluster is named: give --ray HOST:PORT or RAY_ADDRESS, or the folder of a run that names its own"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_run(parser)
    parser.add_argument(
        "--ray", metavar="ADDRESS", help="address of the cluster (default: RAY_ADDRESS, or the cluster of the run)"
    )
    parser.add_argument("--to", metavar="URL", help="also copy the run to this URL, with fsspec")
    arguments.add_dir(parser)
    arguments.add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    parent = arguments.parent(parsed)
    if parsed.to and (not is_url(parsed.to) or lacks(parsed.to)):
        why = lacks(parsed.to) if is_url(parsed.to) else "it takes a URL such as s3://bucket/folder or file:///folder"
        return complain(f"collect: --to {shown(parsed.to)}: {why}", 2)
    told: dict[str, Any] = {}
    missing: list[str] = []
    patience = Patience()
    try:
        with contextlib.ExitStack() as stack:
            try:
                ray, folder = _connected(stack, parent, parsed)
            except cluster.Unreachable as error:
                folder = _here(parent, parsed.name, str(error))
                missing += _without(folder, str(error))
                if not missing and not parsed.json:
                    print(plain(f"{error}; nothing of run {folder.name} lacks here"))
            else:
                result = gather.collect(ray, folder, patience, progress=partial(console.bar, "collecting"))
                told = msgspec.to_builtins(result)
                missing += [each.line for each in result.missing]
                if not parsed.json:
                    _show(result)
        if parsed.to:
            sending = Sending(folder, parsed.to, patience)
            with console.bar("copying", sum(size for _, size, _ in sending.files())) as done:
                lacking = sending.send(done)
            missing += [f"{shown(parsed.to)}: {each.line}" for each in lacking]
            told |= {"copied": {"to": shown(parsed.to), "files": sending.sent, "bytes": sending.bytes}}
            if not parsed.json:
                size = f"{units.count(sending.sent, 'file')}, {units.size(sending.bytes)}"
                print(f"{size}, copied to {shown(parsed.to)}/{folder.name}")
    except (Busy, NoTarget) as error:
        return complain(f"collect: {error}", 1)
    except OSError as error:
        where = error.filename or parent
        return complain(
            f"collect: {where}: {error.strerror}; run the command again to continue from the files that are here", 1
        )
    if parsed.json:
        known = {"run": folder.name, "directory": str(folder)} | told
        console.print_json(msgspec.convert(known | {"missing_lines": missing}, Collected))
    else:
        for line in missing:
            print(plain(f"missing: {line}"))
    return 1 if missing else 0


def _connected(stack: contextlib.ExitStack, parent: Path, parsed: argparse.Namespace) -> tuple[Any, Path]:
    """Connect to the cluster that `--ray`, RAY_ADDRESS or the run names; return Ray and the run's directory here.

    Raises:
        NotFound: There is no such run, or several.
        Unreachable: The run names no cluster, or the cluster can't be reached or does not know the run.
    """
    given = os.environ.get("RAY_ADDRESS", "")
    if parsed.ray is not None:
        return stack.enter_context(arguments.cluster(parsed.ray, "--ray")), _found(parent, parsed.name)
    # Ray starts a cluster for `local`.
    if given not in ("", "local"):
        return stack.enter_context(arguments.cluster(given, "RAY_ADDRESS")), _found(parent, parsed.name)
    folder = _here(parent, parsed.name, _NO_CLUSTER)
    address = processes.ray_address(RunDir(folder))
    if not address:
        raise cluster.Unreachable("the run names no Ray cluster; --ray HOST:PORT gives one")
    ray = stack.enter_context(arguments.cluster(address, f"run {folder.name}"))
    if not cluster.nodes_of_run(folder.name):
        raise cluster.Unreachable(f"the Ray cluster at {address} does not know run {folder.name}")
    return ray, folder


def _found(parent: Path, name: str) -> Path:
    """Find the directory of a run that the cluster knows, or that is here.

    Raises:
        NotFound: There is none, or several.
    """
    users = cluster.users_of_run()
    if name == runs.LATEST:
        matching = [each for each, uid in users.items() if runs.own(uid)][-1:]
    else:
        matching = [each for each in users if each.startswith(Path(name).name)]
    try:
        here = runs.find(parent, matching[0] if len(matching) == 1 else name)
        return Path(here.path)
    except runs.NotFound as error:
        if len(matching) == 1:
            return (parent / matching[0]).absolute()
        named = dict([*users.items()][-5:]) if not matching else {each: users[each] for each in matching[-5:]}
        raise runs.NotFound(f"{error}; the cluster knows {runs.with_users(named)}") from None


def _here(parent: Path, name: str, why: str) -> Path:
    """Find the directory of a run that is here. `why` is the reason that no cluster is asked for it.

    Raises:
        NotFound: There is none, or several.
    """
    try:
        return Path(runs.find(parent, name).path)
    except runs.NotFound as error:
        raise runs.NotFound(f"{why}; {error}") from None


def _without(run: Path, why: str) -> list[str]:
    """Return the missing parts of a run whose cluster can't be asked, from its driver's notes at the end."""
    info = decoder.read(run / RUN, RunFile)
    collected = decoder.read(run / COLLECTED, CollectedFile)
    alone = info.state in (runs.ENDED, runs.FAILED) and not info.nodes
    if alone or (collected.when is not None and not collected.missing):
        return []
    others = [each for each in info.nodes if each.host != info.host]
    named = ", ".join(f"{each.host} ({each.id[:8]})" for each in others)
    return [f"{why}; {f'what {named} left may be there still' if named else 'whether nodes have more is not known'}"]


def _show(result: Any) -> None:
    rows = [
        [node.host, node.id[:8], node.state, str(node.files), units.size(node.bytes), units.size(node.fetched)]
        for node in result.nodes
    ]
    console.show(["host", "node", "state", "files", "size", "fetched"], rows)
    print()
    for each in result.left_out:
        print(plain(f"left out: {each.line}"))
    print(plain(f"{units.size(result.fetched)} fetched into {result.directory}"))
