"""`autoprof trigger --wait`: follows a request in the run until its files are there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from autoprof.base import units
from autoprof.base.redact import plain
from autoprof.cli import console
from autoprof.cli.documents import Folder, Triggered
from autoprof.cli.trigger.view import Contents, Place, View
from autoprof.windows.trigger_requests import Became, Trigger

# Nothing waits for a file that has not changed for so long, nor for a folder: torch_npu's is analysed for up to an
# hour, and may be as it was meanwhile.
_FILE_S = 120.0
_FOLDER_S = 3700.0
# The same where the run is over, and who could still write to a file has outlived it.
_AFTER_S = 15.0
# For so many looks a request may be nowhere: while it is taken from Ray, and written down.
_NOWHERE = 10


class GaveUp(Exception):
    """The awaited traces will not come. The message says why."""


def wait(place: Place, trigger: Trigger, document: Triggered, pause_s: float, aside: bool = False) -> None:
    """Say how far a request is until its traces are there, and then where.

    Args:
        place: Where the run is.
        trigger: What was asked for.
        document: The request as it was left; what comes of it is added.
        pause_s: Seconds between two looks.
        aside: Whether stdout is left to the document.

    Raises:
        GaveUp: They will not come, or not all.
        Gone: The run can't be looked at any more.
        KeyboardInterrupt: The user has had enough of waiting.
    """
    total = 0 if trigger.at else trigger.steps
    with console.lines(total, aside) as show:
        became = _windows_passed(place, document.request, pause_s, show, total)
        views, left = _files_written(place, became.captured, pause_s, show)
    folders = _folders(views)
    problems = list(_problems(folders, became.captured, left))
    document.captured, document.problems, document.reason = became.captured, problems, became.reason
    document.folders = [
        Folder(step, host, contents.folder, len(contents.captures), sum(each[2] for each in contents.captures.values()))
        for step, hosts in folders.items()
        for host, contents in hosts
    ]
    if not aside:
        _say(document, views[0].host)
    if became.reason:
        raise GaveUp(f"steps captured: {', '.join(map(str, became.captured)) or 'none'}; {became.reason}")
    if problems:
        raise GaveUp("not all captures are complete; see autoprof doctor RUN")


def _windows_passed(place: Place, name: str, pause_s: float, show: console.Show, total: int) -> Became:
    """Wait until no step of the request is to come."""
    nowhere = 0
    while True:
        here = place.look()[0]
        became = here.became(name)
        if became is None:
            there = name in here.requests or place.pending(name)
            nowhere = 0 if there else nowhere + 1
            if nowhere > _NOWHERE:
                raise GaveUp("the request is gone: its file was removed")
            show("waiting for a step to begin" if there else "taken", 0)
        elif became.state == "refused":
            raise GaveUp(f"the request was refused: {became.reason}")
        elif became.state == "joined":
            show("the same was asked for already; this waits for it, too", 0)
            name = became.joined
            continue
        else:
            _tell(became, show, total)
            if became.over:
                return became
        if not here.alive:
            if became is not None and became.captured:
                became.reason = "the run has ended"
                return became
            raise GaveUp("the run has ended" + (" before the request was taken" if became is None else ""))
        if here.off:
            raise GaveUp("autoprof is switched off in the run; the request stands, and --on has it go on")
        time.sleep(pause_s)


def _tell(became: Became, show: console.Show, total: int) -> None:
    """Say which steps there are."""
    for count, step in enumerate(became.captured, 1):
        show(f"step {step} is captured{f' ({count} of {total})' if total > 1 else ''}", count)
    if became.going_on is not None:
        show(f"step {became.going_on} is being captured", len(became.captured))
    elif became.state == "taken":
        show("taken; its first step is to come", 0)


def _files_written(
    place: Place, steps: Sequence[int], pause_s: float, show: console.Show
) -> tuple[list[View], list[str]]:
    """Wait until all files have their final names. Returns those that don't get any."""
    seen: dict[str, tuple[object, float]] = {}
    while True:
        views = place.look(steps)
        now = time.monotonic()
        unfinished = {
            f"{contents.folder}/{name}": state
            for view in views
            for contents in view.steps.values()
            for name, state in contents.unfinished.items()
        }
        waiting = []
        for path, state in unfinished.items():
            since = seen[path][1] if path in seen and seen[path][0] == state else now
            seen[path] = state, since
            patience_s = (_FOLDER_S if state[2] else _FILE_S) if views[0].alive else _AFTER_S
            if now - since < patience_s:
                waiting.append(path)
        if not waiting:
            return views, sorted(unfinished)
        show(f"files that are still being written: {len(waiting)}", len(steps))
        time.sleep(pause_s)


def _folders(views: Sequence[View]) -> dict[int, list[tuple[str, Contents]]]:
    """Return each host's folder by step, but once where hosts share a disk: names of captures have the host in them."""
    found: dict[int, list[tuple[str, Contents]]] = {}
    for view in views:
        for step, contents in sorted(view.steps.items()):
            known = found.setdefault(step, [])
            names = contents.captures.keys()
            if not known or (names and all(names != other.captures.keys() for _, other in known)):
                known.append((view.host, contents))
    return found


def _problems(
    folders: dict[int, list[tuple[str, Contents]]], steps: Sequence[int], left: Sequence[str]
) -> Iterator[str]:
    if steps and not any(contents.captures for hosts in folders.values() for _, contents in hosts):
        yield "there is no capture in any of the steps"
    for step, hosts in folders.items():
        for _, contents in hosts:
            for name, (state, reason, _) in contents.captures.items():
                if state != "complete":
                    yield f"step {step}, {name}: {state}{f', {reason}' if reason else ''}"
    for path in left:
        yield f"{path}: it is not complete, and does not grow"


def _say(document: Triggered, here: str) -> None:
    """Say where the traces are: counts, and then the folders, a line each, with their hosts where these differ."""
    for problem in document.problems:
        print(plain(problem), flush=True)
    count, size = (sum(getattr(folder, name) for folder in document.folders) for name in ("captures", "bytes"))
    print(f"captures: {count}, {units.size(size)}", flush=True)
    several = any(folder.host != here for folder in document.folders)
    for folder in document.folders:
        print(plain(f"{folder.host}:{folder.path}" if several else folder.path), flush=True)
