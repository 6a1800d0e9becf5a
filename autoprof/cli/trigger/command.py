"""`autoprof trigger`: opens a window in a run that is going on, or switches autoprof in it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Literal, NamedTuple

from autoprof.cli import arguments, console
from autoprof.cli.console import complain
from autoprof.cli.documents import Triggered
from autoprof.cli.trigger import in_ray
from autoprof.cli.trigger import view as trigger_view
from autoprof.cli.trigger import wait as trigger_wait
from autoprof.cli.trigger.view import Place
from autoprof.config.values import WINDOW_FIELDS
from autoprof.run.cluster import connect
from autoprof.run.cluster.connect import Gone
from autoprof.rundir import runs
from autoprof.rundir.layout import RunDir
from autoprof.windows import trigger_requests
from autoprof.windows.trigger_requests import Trigger

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
    trigger = trigger_requests.checked(Trigger(steps=parsed.steps, since=parsed.since, at=parsed.at, overrides=window))
    switch: Literal["", "off", "on"] = "off" if parsed.off else "on" if parsed.on else ""
    if switch and (parsed.wait or trigger != Trigger()):
        return complain(f"trigger: --{switch} switches the whole run; it takes no options of a window and no --wait", 2)
    if switch:
        trigger = Trigger(switch=switch)
    try:
        if parsed.ray is None:
            return _on_disk(arguments.find_run(parsed), trigger, Answer(parsed.wait, parsed.json))
        with arguments.cluster(parsed.ray, "--ray") as ray:
            return _in_ray(in_ray.find(ray, parsed.name), trigger, Answer(parsed.wait, parsed.json))
    except OSError as error:
        return complain(
            f"trigger: {error.filename}: {error.strerror}; only users who may write there can send requests", 1
        )
    except connect.Lost as error:
        complain(f"trigger: {error}", 1)
        sys.stdout.flush()
        # What Ray does at exit would wait for its head.
        os._exit(1)
    except connect.Unreachable as error:
        return complain(f"trigger: --ray: {error}", 1)
    except (Gone, trigger_wait.GaveUp) as error:
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
        trigger_requests.switch(directory, trigger.switch == "off")
        return _switched(run.id, trigger, answer)
    place = trigger_view.OnDisk(run)
    (view,) = place.look()
    if answer.wait and view.off:
        return complain(f"trigger: {_OFF.format(run.id)}", 1)
    standing = view.standing(trigger)
    name = standing or trigger_requests.ask(directory, trigger).name
    answer.say(_asked(f"run {run.id}", trigger, str(directory.control / name), bool(standing)))
    document = Triggered(run=run.id, request=name, joined=bool(standing), off=view.off)
    return _follow(place, trigger, document, answer, _PAUSE_S)


def _in_ray(place: in_ray.InRay, trigger: Trigger, answer: Answer) -> int:
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
        trigger_wait.wait(place, trigger, document, pause_s, aside=answer.as_json)
    except KeyboardInterrupt:
        text = "the request stands; run the same command to wait for it again"
        print(file=sys.stderr)
        return complain(text, 130)
    except trigger_wait.GaveUp as error:
        document.reason = document.reason or str(error)
        answer.end(document)
        raise
    return answer.end(document)
