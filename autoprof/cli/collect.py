"""`autoprof collect`: fetches the parts of a run from the nodes' own disks into one directory."""

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
from autoprof.base.redact import url as redacted
from autoprof.cli import arguments, console
from autoprof.cli.console import complain
from autoprof.cli.documents import Collected, Copied
from autoprof.run import cluster, gather
from autoprof.run.gather import Busy
from autoprof.run.upload import NoTarget, Sending, lacks
from autoprof.rundir import layout, processes, runs
from autoprof.rundir.file_names import COLLECTED, RUN
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import CollectedFile, RunFile

_NO_CLUSTER = "no Ray cluster is known: give --ray HOST:PORT, set RAY_ADDRESS, or name a run that recorded its cluster"


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
        reason = (
            lacks(parsed.to) if is_url(parsed.to) else "it takes a URL such as s3://bucket/folder or file:///folder"
        )
        return complain(f"collect: --to {redacted(parsed.to)}: {reason}", 2)
    try:
        document = _collect(parent, parsed)
        if parsed.to:
            _copy_run(document, parsed)
    except (Busy, NoTarget) as error:
        return complain(f"collect: {error}", 1)
    except OSError as error:
        path = error.filename or parent
        return complain(
            f"collect: {path}: {error.strerror}; run the command again to continue from the files that are here", 1
        )
    if parsed.json:
        console.print_json(document)
    else:
        for line in document.missing_lines:
            print(plain(f"missing: {line}"))
    return 1 if document.missing_lines else 0


def _collect(parent: Path, parsed: argparse.Namespace) -> Collected:
    """Fetch the parts of a run from its cluster, if the cluster can be reached. Return the result."""
    with contextlib.ExitStack() as stack:
        try:
            ray, folder = _connect_to_cluster(stack, parent, parsed)
        except cluster.Unreachable as error:
            folder = _local_directory(parent, parsed.name, str(error))
            missing_lines = _missing_without_cluster(folder, str(error))
            if not missing_lines and not parsed.json:
                print(plain(f"{error}; run {folder.name} is complete here"))
            return Collected(run=folder.name, directory=str(folder), missing_lines=missing_lines)
        result = gather.collect(ray, folder, progress=partial(console.bar, "collecting"))
    if not parsed.json:
        _show(result)
    return Collected(**msgspec.structs.asdict(result), missing_lines=[part.line for part in result.missing])


def _copy_run(document: Collected, parsed: argparse.Namespace) -> None:
    """Copy a collected run to the URL `--to`, and add the result to the document."""
    sending, to = Sending(Path(document.directory), parsed.to), redacted(parsed.to)
    with console.bar("copying", sum(size for _, size, _ in sending.files())) as advance:
        not_copied = sending.send(advance)
    document.missing_lines += [f"{to}: {part.line}" for part in not_copied]
    document.copied = Copied(to=to, files=sending.sent, bytes=sending.bytes)
    if not parsed.json:
        size = f"{units.count(sending.sent, 'file')}, {units.size(sending.bytes)}"
        print(f"{size}, copied to {to}/{document.run}")


def _connect_to_cluster(stack: contextlib.ExitStack, parent: Path, parsed: argparse.Namespace) -> tuple[Any, Path]:
    """Connect to the Ray cluster of a run. Return the module `ray`, and the run's directory on this machine.

    The address of the cluster is `--ray`, else RAY_ADDRESS, else the address that the run recorded. `stack` ends the
    connection.

    Raises:
        NotFound: No run matches, or several do.
        Unreachable: The run recorded no cluster, or the cluster can't be reached, or the cluster does not know the run.
    """
    environment_address = os.environ.get("RAY_ADDRESS", "")
    if parsed.ray is not None:
        return stack.enter_context(arguments.cluster(parsed.ray, "--ray")), _directory(parent, parsed.name)
    # Ignore the address `local`, because Ray would start a new cluster.
    if environment_address not in ("", "local"):
        ray = stack.enter_context(arguments.cluster(environment_address, "RAY_ADDRESS"))
        return ray, _directory(parent, parsed.name)
    folder = _local_directory(parent, parsed.name, _NO_CLUSTER)
    address = processes.ray_address(RunDir(folder))
    if not address:
        raise cluster.Unreachable("the run names no Ray cluster; name one with --ray HOST:PORT")
    ray = stack.enter_context(arguments.cluster(address, f"run {folder.name}"))
    if not cluster.nodes_of_run(folder.name):
        raise cluster.Unreachable(f"the Ray cluster at {address} does not know run {folder.name}")
    return ray, folder


def _directory(parent: Path, name: str) -> Path:
    """Return the directory on this machine of a run that is here already, or that only the cluster knows.

    If only the cluster knows the run, the directory does not exist yet.

    Raises:
        NotFound: No run matches, or several do.
    """
    users = cluster.users_of_run()
    if name == runs.LATEST:
        matching = [run_id for run_id, uid in users.items() if runs.belongs_to_this_user(uid)][-1:]
    else:
        matching = [run_id for run_id in users if run_id.startswith(Path(name).name)]
    try:
        run = runs.find(parent, matching[0] if len(matching) == 1 else name)
        return Path(run.path)
    except runs.NotFound as error:
        if len(matching) == 1:
            return (parent / matching[0]).absolute()
        candidates = (
            dict([*users.items()][-5:]) if not matching else {run_id: users[run_id] for run_id in matching[-5:]}
        )
        raise runs.NotFound(f"{error}; the cluster knows {runs.ids_with_users(candidates)}") from None


def _local_directory(parent: Path, name: str, reason: str) -> Path:
    """Return the directory of a run that is on this machine.

    Args:
        parent: The folder that contains the runs.
        name: The name of the run, as `runs.find` takes it.
        reason: The reason why no cluster is asked for the run. It is a part of the error message.

    Raises:
        NotFound: No run matches, or several do.
    """
    try:
        return Path(runs.find(parent, name).path)
    except runs.NotFound as error:
        raise runs.NotFound(f"{reason}; {error}") from None


def _missing_without_cluster(run_path: Path, reason: str) -> list[str]:
    """Return a line about the parts of a run that may be missing here, if its cluster can't be asked.

    The driver of the run recorded the nodes in `run.json`. Return an empty list if no part is missing.
    """
    info = layout.read_json(run_path / RUN, RunFile)
    collected = layout.read_json(run_path / COLLECTED, CollectedFile)
    single_node = info.state in (runs.ENDED, runs.FAILED) and not info.nodes
    if single_node or (collected.when is not None and not collected.missing):
        return []
    other_nodes = [node for node in info.nodes if node.host != info.host]
    names = ", ".join(f"{node.host} ({node.id[:8]})" for node in other_nodes)
    return [f"{reason}; {f'files on {names} may be missing' if names else 'other nodes may have more files'}"]


def _show(result: CollectedFile) -> None:
    rows = [
        [node.host, node.id[:8], node.state, str(node.files), units.size(node.bytes), units.size(node.fetched)]
        for node in result.nodes
    ]
    console.show(["host", "node", "state", "files", "size", "fetched"], rows)
    print()
    for part in result.left_out:
        print(plain(f"left out: {part.line}"))
    print(plain(f"{units.size(result.fetched)} fetched into {result.directory}"))
