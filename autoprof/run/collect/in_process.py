"""Collection of a run through the cluster that this process is connected to; it brings `run.json` up to date."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from autoprof.base import files, identity
from autoprof.base.originals import time
from autoprof.base.redact import hidden_in
from autoprof.run.cluster import nodes
from autoprof.run.collect.ask import OnRay, Patience
from autoprof.run.collect.gather import Gathering, Progress
from autoprof.rundir import decoder, layout, processes, runs
from autoprof.rundir.file_names import COLLECTED
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import CollectedFile, RunFile


def collect(
    ray: Any,
    run: Path,
    patience: Patience,
    *,
    wait: bool = False,
    progress: Callable[[int], contextlib.AbstractContextManager[Progress]],
) -> CollectedFile:
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
        files.open_as(run)
    gathering = Gathering(run, known, alive, lambda node: OnRay(ray, node, patience), patience)
    result = gathering.gather(wait, progress)
    note(result)
    return result


def note(result: CollectedFile) -> None:
    """Write down what collecting came to, and have `run.json` tell of all hosts.

    Raises:
        OSError: It can't be written.
    """
    directory = RunDir(Path(result.directory))
    told = hidden_in(msgspec.to_builtins(msgspec.structs.replace(result, when=time.time())))
    layout.write_json(directory.path / COLLECTED, told)
    fields = decoder.fields(directory.run_json, RunFile)
    info = decoder.record(fields, RunFile)
    # The process that started the run brings it up to date when it ends.
    if fields and not (info.host == identity.HOST and runs.state(info, directory.path) == "running"):
        found = processes.summary(directory, info.versions)
        hosts = sorted({*found["hosts"], *info.hosts})
        recipes = sorted({*found["recipes"], *info.recipes})
        layout.write_json(directory.run_json, fields | found | {"hosts": hosts, "recipes": recipes})
        if not directory.path.with_name("latest").exists():
            directory.point_latest()
