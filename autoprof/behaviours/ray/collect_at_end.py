"""End of a run on several nodes, in the process that started it: its questions to Ray while that is up, and with
`AUTOPROF_COLLECT` the collection of the nodes' parts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from autoprof.base import log, redact, units
from autoprof.run import end
from autoprof.run.cluster import kv, nodes
from autoprof.run.collect import result as results
from autoprof.run.runtime import Runtime


def hindrance(run: Runtime) -> str:
    """Return the reason that the run can't be copied, known when it begins; an empty text for none."""
    to = run.settings.collect
    if not redact.is_url(to):
        return ""
    from autoprof.run.collect.upload import lacks

    why = lacks(to)
    return f"AUTOPROF_COLLECT: the run can't be copied to {redact.url(to)}: {why}" if why else ""


def through_ray(run: Runtime) -> None:
    """Collect where that was asked for. Nothing is done in processes that have not started the run, or without Ray.

    Raises:
        OSError: It can't be written here.
    """
    if not run.started_here or not kv.up():
        return
    ray = sys.modules["ray"]
    known = nodes.of_run(run.info.id)
    others = {node["NodeID"] for node in ray.nodes() if node["Alive"]} | {node.id for node in known}
    if len(others) > 1:
        run.nodes = nodes.public(known)
        if run.settings.collect:
            _collect(run, ray)
    if run.settings.on_finish and run.rundir.steps():
        end.first_to_finish(run)


def _collect(run: Runtime, ray: object) -> None:
    from autoprof.run.collect import gather, in_process
    from autoprof.run.collect.ask import Patience

    patience = Patience(run.settings.stop_timeout_s)
    try:
        result = in_process.collect(ray, run.rundir.path, patience, wait=True, progress=_quietly)
    except gather.Busy as error:
        log.warning(f"the run is not collected: {error}")
        return
    results.warn_missing(
        result.missing, f"autoprof collect {run.info.id} fetches what is still there, while the cluster is up"
    )
    log.info(f"{units.size(result.fetched)} were collected from {units.count(len(result.nodes), 'node')}")


@contextlib.contextmanager
def _quietly(total: int) -> Iterator[Callable[[int], object]]:
    yield lambda done: None
