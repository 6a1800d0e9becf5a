"""`autoprof trigger`: opens a window in a running run, or switches autoprof on or off in it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from autoprof.base import units
from autoprof.base.redact import plain
from autoprof.cli import arguments, console
from autoprof.cli.console import complain
from autoprof.cli.documents import Folder, Triggered
from autoprof.cli.trigger import view as trigger_view
from autoprof.cli.trigger.view import Contents, Place, View
from autoprof.config.values import WINDOW_FIELDS
from autoprof.run import cluster
from autoprof.run.cluster import Gone
from autoprof.rundir import runs
from autoprof.rundir.layout import RunDir
from autoprof.windows import requests
from autoprof.windows.requests import Became, Trigger

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


def wait_for_files(
    place: Place, trigger: Trigger, document: Triggered, pause_s: float, keep_stdout: bool = False
) -> None:
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
    with console.lines(total, keep_stdout) as show:
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
    if not keep_stdout:
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


# Seconds between two looks at a run: at files, and by tasks of Ray's.
_PAUSE_S = 0.3
_RAY_PAUSE_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_run(parser)
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="number of steps (default: 1)")
    parser.add_argument("--from", type=int, dest="since", metavar="M", help="first step (default: the next one)")
    parser.add_argument(
        "--at", default="", metavar="STEPS", help="steps, instead of --steps and --from: 12,15 or 20:24 or ::50"
    )
    for option in WINDOW_FIELDS:
        name = option.replace("_", "-")
        parser.add_argument(f"--{name}", metavar="VALUE", help=f"{arguments.SETTINGS[name]}; for this window")
    parser.add_argument(
        "--wait", action="store_true", help="wait until the traces are complete, then print their folders"
    )
    parser.add_argument(
        "--ray", metavar="ADDRESS", help="send the request through Ray: auto, or an address as ray.init takes it"
    )
    switch = parser.add_mutually_exclusive_group()
    switch.add_argument("--off", action="store_true", help="switch autoprof off in the run, from the next step on")
    switch.add_argument("--on", action="store_true", help="switch autoprof on again")
    arguments.add_dir(parser)
    arguments.add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    window = {name: getattr(parsed, name) for name in WINDOW_FIELDS if getattr(parsed, name) is not None}
    trigger = requests.checked(Trigger(steps=parsed.steps, since=parsed.since, at=parsed.at, overrides=window))
    switch: Literal["", "off", "on"] = "off" if parsed.off else "on" if parsed.on else ""
    if switch and (parsed.wait or trigger != Trigger()):
        return complain(f"trigger: --{switch} switches the whole run; it takes no options of a window and no --wait", 2)
    if switch:
        trigger = Trigger(switch=switch)
    try:
        if parsed.ray is None:
            return _on_disk(arguments.find_run(parsed), trigger, Answer(parsed.wait, parsed.json))
        with arguments.cluster(parsed.ray, "--ray") as ray:
            return _in_ray(trigger_view.find_in_ray(ray, parsed.name), trigger, Answer(parsed.wait, parsed.json))
    except OSError as error:
        return complain(
            f"trigger: {error.filename}: {error.strerror}; only users who may write there can send requests", 1
        )
    except cluster.Lost as error:
        complain(f"trigger: {error}", 1)
        sys.stdout.flush()
        # What Ray does at exit would wait for its head.
        os._exit(1)
    except cluster.Unreachable as error:
        return complain(f"trigger: --ray: {error}", 1)
    except (Gone, GaveUp) as error:
        return complain(f"trigger: {error}", 1)


class Answer(NamedTuple):
    """Form of the answer: `wait` for the traces, and say all that is said `as_json`."""

    wait: bool
    as_json: bool

    def say(self, text: str) -> None:
        """Print a line; on stderr where stdout is for JSON."""
        print(text, file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def end(self, document: Triggered) -> int:
        """Print the document, if it is asked for, and return the exit status."""
        if self.as_json:
            console.print_json(document)
        return 0


def _on_disk(run: runs.Run, trigger: Trigger, answer: Answer) -> int:
    if not run.state.startswith("running"):
        return complain(f"trigger: run {run.id} is not going on: its state is {run.state}", 1)
    directory = RunDir(Path(run.path))
    if trigger.switch:
        requests.switch(directory, trigger.switch == "off")
        return _switched(run.id, trigger, answer)
    place = trigger_view.OnDisk(run)
    (view,) = place.look()
    if answer.wait and view.off:
        return complain(f"trigger: {_OFF.format(run.id)}", 1)
    standing = view.standing(trigger)
    name = standing or requests.ask(directory, trigger).name
    answer.say(_asked(f"run {run.id}", trigger, str(directory.control / name), bool(standing)))
    document = Triggered(run=run.id, request=name, joined=bool(standing), off=view.off)
    return _follow(place, trigger, document, answer, _PAUSE_S)


def _in_ray(place: trigger_view.InRay, trigger: Trigger, answer: Answer) -> int:
    run_id = place.run.id
    (view,) = place.look()
    if not view.alive:
        return complain(f"trigger: run {run_id} is not going on: its trainer's process has ended", 1)
    if trigger.switch:
        place.ask(trigger)
        return _switched(run_id, trigger, answer)
    if answer.wait and view.off:
        return complain(f"trigger: {_OFF.format(run_id)}", 1)
    standing = place.standing(trigger, view)
    name = standing or place.ask(trigger)
    run, where = (f"run {run_id}", name) if standing else (f"run {run_id} on {place.run.host}", "Ray")
    answer.say(_asked(run, trigger, where, bool(standing)))
    document = Triggered(run=run_id, request=name, joined=bool(standing), off=view.off)
    return _follow(place, trigger, document, answer, _RAY_PAUSE_S)


_OFF = "autoprof is switched off in run {0}: nothing was asked; switch it on first, by --on"


def _switched(run_id: str, trigger: Trigger, answer: Answer) -> int:
    answer.say(f"autoprof is switched {trigger.switch} in run {run_id} from the next step on")
    return answer.end(Triggered(run=run_id, off=trigger.switch == "off"))


def _asked(run: str, trigger: Trigger, where: str, joined: bool) -> str:
    if joined:
        return f"{run} has been asked for {trigger} already, in {where}: this joins it"
    return f"asked {run} for {trigger}, in {where}"


def _follow(place: Place, trigger: Trigger, document: Triggered, answer: Answer, pause_s: float) -> int:
    """Wait for the traces, if that is asked for, and return the exit status."""
    if not answer.wait:
        answer.say("it looks when a step begins; a server without a trainer when a request comes")
        if document.off:
            answer.say("autoprof is switched off in it: nothing is captured until it is switched on, by --on")
        return answer.end(document)
    try:
        wait_for_files(place, trigger, document, pause_s, keep_stdout=answer.as_json)
    except KeyboardInterrupt:
        text = "the request stands; run the same command to wait for it again"
        print(file=sys.stderr)
        return complain(text, 130)
    except GaveUp as error:
        document.reason = document.reason or str(error)
        answer.end(document)
        raise
    return answer.end(document)
