"""The end of a run on several nodes, in the process that started it: what is to be asked while Ray is up is asked, and
with `AUTOPROF_COLLECT` the parts of the nodes are brought together."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from autoprof import ending, interrupts, log, nodes, redaction, store
from autoprof.collect.result import Missing
from autoprof.runtime import Runtime

_NAMED = 3


def hindrance(run: Runtime) -> str:
    """What will stand in the way of copying the run, said when it begins; an empty text for nothing."""
    to = run.settings.collect
    if not redaction.is_url(to):
        return ""
    from autoprof.collect.sending import lacks

    why = lacks(to)
    return f"AUTOPROF_COLLECT: the run can't be copied to {redaction.url(to)}: {why}" if why else ""


def through_ray(run: Runtime) -> None:
    """Collect where that was asked for. Nothing is done in processes that have not started the run, or without Ray.

    Raises:
        OSError: It can't be written here.
    """
    if not run.started_here or not store.up():
        return
    ray = sys.modules["ray"]
    known = nodes.of_run(run.info.id)
    others = {node["NodeID"] for node in ray.nodes() if node["Alive"]} | {node.id for node in known}
    if len(others) > 1:
        run.nodes = nodes.public(known)
        if run.settings.collect:
            _collect(run, ray)
    if run.settings.on_finish and run.rundir.steps():
        ending.first_to_finish(run)


def _collect(run: Runtime, ray: object) -> None:
    from autoprof.collect import gathering, here
    from autoprof.collect.asking import Patience

    patience = Patience(run.settings.stop_timeout_s)
    try:
        result = here.collect(ray, run.rundir.path, patience, wait=True, progress=_quietly)
    except gathering.Busy as error:
        log.warning(f"the run is not collected: {error}")
        return
    _say(result.missing, f"autoprof collect {run.info.id} fetches what is still there, while the cluster is up")
    log.info(f"{result.fetched} bytes were collected from {len(result.nodes)} nodes")


def copy(run: Path, to: str) -> None:
    """Copy a run that is over. What goes wrong is said. Nothing is raised."""
    from autoprof.collect.asking import Patience
    from autoprof.collect.sending import NoTarget, Sending

    log.configure("warning")
    try:
        missing = Sending(run, to, Patience()).send(lambda done: None)
        _say(missing, f"autoprof collect {run.name} --to URL goes on with it")
    except (NoTarget, OSError) as error:
        interrupts.pass_on(error)
        log.warning(f"the run is not copied: {error}")


def _say(missing: list[Missing], then: str) -> None:
    if missing:
        named = "; ".join(each.line for each in missing[:_NAMED])
        more = f"; and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        log.warning(f"collecting is not complete: {named}{more}; {then}")


@contextlib.contextmanager
def _quietly(total: int) -> Iterator[Callable[[int], object]]:
    yield lambda done: None
