"""`autoprof collect`: brings the parts of a run together that its nodes have on disks of their own."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from autoprof import cluster, listing, nodes, progress, tables
from autoprof.documents import CollectedDocument, RunDocument
from autoprof.redaction import is_url, plain
from autoprof.redaction import url as shown
from autoprof.rundir import COLLECTED


def add(commands: Any, parent: Callable[[argparse.Namespace], Path]) -> argparse.ArgumentParser:
    """Add the command to those of the parser; `parent` gives the folder of the runs."""
    text = "bring the parts of a run together that its nodes have on disks of their own"
    parser: argparse.ArgumentParser = commands.add_parser("collect", help=text)
    parser.add_argument("name", nargs="?", metavar="RUN", default="latest", help="a run, as for ls (default: latest)")
    parser.add_argument("--ray", metavar="ADDRESS", help="the cluster (default: RAY_ADDRESS, or that of this machine)")
    parser.add_argument("--to", metavar="URL", help="copy the run there, too: anything that fsspec reaches")
    parser.set_defaults(run=lambda parsed: _run(parsed, parent(parsed)))
    return parser


def _run(parsed: argparse.Namespace, parent: Path) -> int:
    from autoprof.collect import here
    from autoprof.collect.asking import Patience
    from autoprof.collect.gathering import Busy
    from autoprof.collect.sending import NoTarget, Sending, lacks

    if parsed.to and (not is_url(parsed.to) or lacks(parsed.to)):
        why = lacks(parsed.to) if is_url(parsed.to) else "it takes a URL such as s3://bucket/folder or file:///folder"
        return _complain(f"--to {shown(parsed.to)}: {why}", 2)
    told: dict[str, Any] = {}
    missing: list[str] = []
    patience = Patience()
    address = parsed.ray or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        with contextlib.ExitStack() as stack:
            try:
                ray = stack.enter_context(cluster.connected(address))
            except cluster.Unreachable as error:
                run = _here(parent, parsed.name, str(error))
                missing += _without(run, str(error))
                if not missing and not parsed.json:
                    print(plain(f"{error}; nothing of run {run.name} lacks here"))
            else:
                run = _found(parent, parsed.name)
                result = here.collect(ray, run, patience, progress=partial(progress.bar, "collecting"))
                told = msgspec.to_builtins(result)
                missing += [each.line for each in result.missing]
                if not parsed.json:
                    _show(result)
        if parsed.to:
            sending = Sending(run, parsed.to, patience)
            with progress.bar("copying", sum(size for _, size, _ in sending.files())) as done:
                lacking = sending.send(done)
            missing += [f"{shown(parsed.to)}: {each.line}" for each in lacking]
            told |= {"copied": {"to": shown(parsed.to), "files": sending.sent, "bytes": sending.bytes}}
            if not parsed.json:
                print(f"{sending.sent} files, {tables.size(sending.bytes)}, copied to {shown(parsed.to)}/{run.name}")
    except (Busy, NoTarget) as error:
        return _complain(str(error), 1)
    except OSError as error:
        return _complain(f"{error.filename or parent}: {error.strerror}; what is here stays, and is gone on with", 1)
    if parsed.json:
        print(json.dumps({"run": run.name, "directory": str(run)} | told | {"missing_lines": missing}, indent=1))
    else:
        for line in missing:
            print(plain(f"missing: {line}"))
    return 1 if missing else 0


def _found(parent: Path, name: str) -> Path:
    """The directory of a run that the cluster knows, or that is here.

    Raises:
        NotFound: There is none, or several.
    """
    known = nodes.runs()
    matching = known[-1:] if name == "latest" else [each for each in known if each.startswith(Path(name).name)]
    try:
        here = listing.find(parent, matching[0] if len(matching) == 1 else name)
        return Path(here.path)
    except listing.NotFound as error:
        if len(matching) == 1:
            return (parent / matching[0]).absolute()
        there = ", ".join(matching[-5:] or known[-5:]) or "none"
        raise listing.NotFound(f"{error}; the cluster knows {there}") from None


def _here(parent: Path, name: str, why: str) -> Path:
    """The directory of a run that is here.

    Raises:
        NotFound: There is none, or several; and `why` nobody else can be asked.
    """
    try:
        return Path(listing.find(parent, name).path)
    except listing.NotFound as error:
        raise listing.NotFound(f"{why}; {error}") from None


def _without(run: Path, why: str) -> list[str]:
    """What is missing of a run whose cluster can't be asked, by what its driver noted at the end."""
    info = listing.load_json(run / "run.json", RunDocument)
    collected = listing.load_json(run / COLLECTED, CollectedDocument)
    alone = info.get("state") == "ended" and not info.get("nodes")
    if alone or (collected and not collected.get("missing")):
        return []
    others = [each for each in info.get("nodes", ()) if each.get("host") != info.get("host")]
    named = ", ".join(f"{each.get('host')} ({str(each.get('id'))[:8]})" for each in others)
    return [f"{why}; {f'what {named} left may be there still' if named else 'whether nodes have more is not known'}"]


def _show(result: Any) -> None:
    rows = [
        [node.host, node.id[:8], node.state, str(node.files), tables.size(node.bytes), tables.size(node.fetched)]
        for node in result.nodes
    ]
    tables.show(["host", "node", "state", "files", "size", "fetched"], rows)
    print()
    for each in result.left_out:
        print(plain(f"left out: {each.line}"))
    print(plain(f"{tables.size(result.fetched)} fetched into {result.directory}"))


def _complain(text: str, status: int) -> int:
    print(f"autoprof: collect: {plain(text)}", file=sys.stderr)
    return status
