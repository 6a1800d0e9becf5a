"""Collects a run through the cluster that this process is connected to, and brings `run.json` up to date."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from autoprof import _files, hooklog, listing, nodes, rundir
from autoprof.collect.asking import OnRay, Patience
from autoprof.collect.gathering import Gathering, Progress
from autoprof.collect.result import Result
from autoprof.documents import RunDocument
from autoprof.redaction import hidden_in
from autoprof.rundir import COLLECTED, RunDir


def collect(
    ray: Any,
    run: Path,
    patience: Patience,
    *,
    wait: bool = False,
    progress: Callable[[int], contextlib.AbstractContextManager[Progress]],
) -> Result:
    """Bring the parts of a run together in its directory here, whose name is its id.

    Args:
        ray: The module, connected to the cluster.
        run: The directory; it is made.
        patience: How long it may take.
        wait: Whether to wait for what processes of the run are still writing.
        progress: Makes a bar for so many bytes.

    Raises:
        Busy: Another process collects it.
        OSError: It can't be written here.
    """
    alive = {node["NodeID"]: str(node["NodeManagerHostname"]) for node in ray.nodes() if node["Alive"]}
    known = nodes.of_run(run.name)
    if run.is_dir():
        _files.open_as(run)
    gathering = Gathering(run, known, alive, lambda node: OnRay(ray, node, patience), patience)
    result = gathering.gather(wait, progress)
    note(result)
    return result


def note(result: Result) -> None:
    """Write down what collecting came to, and have `run.json` tell of all hosts.

    Raises:
        OSError: It can't be written.
    """
    directory = RunDir(Path(result.directory))
    told = hidden_in(msgspec.to_builtins(result)) | {"when": time.time()}
    rundir.write_json(directory.path / COLLECTED, told)
    info = listing.load_json(directory.run_json, RunDocument)
    # The process that started the run brings it up to date when it ends.
    if info and not (info.get("host") == rundir.HOST and listing.state(info) == "running"):
        found = hooklog.summary(directory, info.get("versions") or {})
        hosts = sorted({*found["hosts"], *info.get("hosts", ())})
        recipes = sorted({*found["recipes"], *info.get("recipes", ())})
        rundir.write_json(directory.run_json, info | found | {"hosts": hosts, "recipes": recipes})
        if not directory.path.with_name("latest").exists():
            directory.point_latest()
