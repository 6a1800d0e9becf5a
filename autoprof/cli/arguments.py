"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoprof.base.redact import url
from autoprof.cli.console import complain
from autoprof.config import sources
from autoprof.config.values import SettingsError
from autoprof.rundir import runs
from autoprof.rundir.runs import Run

# What settings do, by the options of that name: `run` takes all, `trigger` those of a window.
SETTINGS = {
    "steps": "steps to capture: 2,5 or 10:13 or ::50 or +2",
    "when": "conditions that open a window: step>2x,update_actor>1.5x,rank>1.3x,memory>0.9,resume:2,oom",
    "dir": "parent of the run directory",
    "access": "who may read the run: private or group",
    "tool": "profilers, in order of preference: torch, npu, nsys, memory",
    "mode": "a trace per stage (discrete) or per step (continuous)",
    "consecutive": "traces of consecutive steps in continuous mode: apart or together",
    "roles": "roles to capture, as patterns",
    "ranks": "global ranks to capture: 0,8 or 0:4 or all or slowest:2",
    "contents": "what to record: cpu,cuda,memory,shapes,stack,...",
    "rollout-iterations": "forward passes of the engine to record: start:stop or all",
    "mini-batches": "mini-batches of a stage to record: start:stop or all",
    "config": "a TOML file with settings",
    "recipes": "further recipe files or folders",
    "disable": "recipes or hooks to leave out, as patterns",
    "collect": "1: collect the parts of all nodes at the end; a URL: also copy the run there",
    "on-finish": "a command to run after the last window",
    "log": "level of autoprof's own log",
}


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add RUN, which `find_run` finds."""
    parser.add_argument("name", nargs="?", metavar="RUN", default="latest", help="a run, as for ls (default: latest)")


def add_dir(parser: argparse.ArgumentParser) -> None:
    """Add `--dir`, which `parent` reads."""
    parser.add_argument("--dir", help="parent of the run directories (default: AUTOPROF_DIR, ./autoprof_runs)")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json` to a command that prints one document on stdout then, and nothing else."""
    parser.add_argument("--json", action="store_true", help="print JSON (docs/reference/json.md)")


def parent(parsed: argparse.Namespace) -> Path:
    """Return the folder of the runs."""
    return Path(parsed.dir or setting("dir"))


def setting(name: str) -> Any:
    """Return a setting for a command that needs no other, and say which of the others is wrong.

    Raises:
        SettingsError: This one is wrong.
    """
    try:
        return getattr(sources.load(os.environ, Path.cwd()), name)
    except SettingsError as error:
        value = sources.one(name, os.environ, Path.cwd())
        complain(f"{error}; this command goes on, a run would not be profiled", 0)
        return value


@contextlib.contextmanager
def cluster(address: str, named_by: str) -> Iterator[Any]:
    """Yield the module `ray`, connected to a cluster whose address is printed on stderr, until the block ends.

    Args:
        address: The address, as `ray.init` takes it.
        named_by: The option, variable or run that names the cluster.

    Raises:
        Unreachable: The cluster can't be reached, or the address names none.
    """
    from autoprof.run.cluster import connect, kv

    with connect.connected(address) as ray:
        verb = f"{address} found" if address == "auto" else "names"
        complain(f"connected to the Ray cluster at {kv.address() or url(address)}, which {named_by} {verb}", 0)
        yield ray


def find_run(parsed: argparse.Namespace) -> Run:
    """Find the run that RUN names.

    Raises:
        NotFound: There is none, or several.
    """
    return runs.find(parent(parsed), parsed.name)
