"""`autoprof trigger`: opens a window in a run that is going on, or switches autoprof in it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from autoprof import cluster, control, listing, waiting, watching
from autoprof.control import Trigger
from autoprof.redaction import plain
from autoprof.rundir import RunDir
from autoprof.settings import WINDOW_FIELDS
from autoprof.watching import Gone, Place

# Seconds between two looks at a run: at files, and by tasks of Ray's.
_PAUSE_S = 0.3
_RAY_PAUSE_S = 1.0


def add(
    commands: Any, parent: Callable[[argparse.Namespace], Path], texts: Mapping[str, str]
) -> argparse.ArgumentParser:
    """Add the command to those of the parser.

    Args:
        commands: Where to.
        parent: Gives the folder of the runs.
        texts: What the settings of a window are, by the option.
    """
    parser: argparse.ArgumentParser = commands.add_parser("trigger", help="open a window in a run that is going on")
    parser.add_argument("name", nargs="?", metavar="RUN", default="latest", help="a run, as for ls (default: latest)")
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="how many steps (default: 1)")
    parser.add_argument("--from", type=int, dest="since", metavar="M", help="from step M on (default: the next step)")
    parser.add_argument("--at", default="", metavar="STEPS", help="in place of the two: 12,15 or 20:24 or ::50")
    for option in WINDOW_FIELDS:
        name = option.replace("_", "-")
        parser.add_argument(f"--{name}", metavar="VALUE", help=f"{texts[name]}; for this window")
    parser.add_argument("--wait", action="store_true", help="until the traces are there; say how far it is, and where")
    parser.add_argument("--ray", metavar="ADDRESS", help="by way of Ray, as ray.init takes it: auto, or HOST:PORT")
    switch = parser.add_mutually_exclusive_group()
    switch.add_argument("--off", action="store_true", help="have autoprof do nothing from the next step on")
    switch.add_argument("--on", action="store_true", help="have it work again")
    parser.set_defaults(run=lambda parsed: _run(parsed, parent))
    return parser


def _run(parsed: argparse.Namespace, parent: Callable[[argparse.Namespace], Path]) -> int:
    window = {name: getattr(parsed, name) for name in WINDOW_FIELDS if getattr(parsed, name) is not None}
    trigger = control.checked(Trigger(steps=parsed.steps, since=parsed.since, at=parsed.at, overrides=window))
    switch: Literal["", "off", "on"] = "off" if parsed.off else "on" if parsed.on else ""
    if switch and (parsed.wait or trigger != Trigger()):
        return _complain(f"--{switch} switches the whole run, and takes no window and no --wait", 2)
    if switch:
        trigger = Trigger(switch=switch)
    try:
        if parsed.ray is None:
            return _on_disk(listing.find(parent(parsed), parsed.name), trigger, parsed.wait)
        with cluster.connected(parsed.ray) as ray:
            return _in_ray(cluster.find(ray, parsed.name), trigger, parsed.wait)
    except OSError as error:
        return _complain(f"{error.filename}: {error.strerror}; only who may write there can ask", 1)
    except cluster.Lost as error:
        _complain(str(error), 1)
        sys.stdout.flush()
        # What Ray does at exit would wait for its head.
        os._exit(1)
    except cluster.Unreachable as error:
        return _complain(f"--ray: {error}", 1)
    except (Gone, waiting.GaveUp) as error:
        return _complain(str(error), 1)


def _on_disk(run: listing.Run, trigger: Trigger, wait: bool) -> int:
    if not run.state.startswith("running"):
        return _complain(f"run {run.id} is not going on: its state is {run.state}", 1)
    directory = RunDir(Path(run.path))
    if trigger.switch:
        control.switch(directory, trigger.switch == "off")
        return _switched(run.id, trigger)
    place = watching.OnDisk(run)
    (view,) = place.look()
    if wait and view.off:
        return _complain(_OFF.format(run.id), 1)
    name = view.standing(trigger)
    if name is None:
        name = control.ask(directory, trigger).name
        print(f"asked run {run.id} for {trigger}, in {directory.control / name}", flush=True)
    else:
        _joined(run.id, trigger, str(directory.control / name))
    return _asked(place, name, trigger, wait, view.off, _PAUSE_S)


def _in_ray(place: cluster.InRay, trigger: Trigger, wait: bool) -> int:
    run_id = place.run.id
    (view,) = place.look()
    if not view.alive:
        return _complain(f"run {run_id} is not going on: its trainer's process is not there any more", 1)
    if trigger.switch:
        place.ask(trigger)
        return _switched(run_id, trigger)
    if wait and view.off:
        return _complain(_OFF.format(run_id), 1)
    name = place.standing(trigger, view)
    if name is None:
        name = place.ask(trigger)
        print(f"asked run {run_id} on {place.run.host} for {trigger}, in Ray", flush=True)
    else:
        _joined(run_id, trigger, name)
    return _asked(place, name, trigger, wait, view.off, _RAY_PAUSE_S)


_OFF = "autoprof is switched off in run {0}: nothing was asked; switch it on first, by --on"


def _switched(run_id: str, trigger: Trigger) -> int:
    print(f"autoprof is switched {trigger.switch} in run {run_id} from the next step on")
    return 0


def _joined(run_id: str, trigger: Trigger, where: str) -> None:
    print(f"run {run_id} has been asked for {trigger} already, in {where}: this joins it", flush=True)


def _asked(place: Place, name: str, trigger: Trigger, wait: bool, off: bool, pause_s: float) -> int:
    if not wait:
        print("it looks when a step begins; a server without a trainer when a request comes")
        if off:
            print("autoprof is switched off in it: nothing is captured until it is switched on, by --on")
        return 0
    try:
        waiting.wait(place, name, trigger, pause_s)
    except KeyboardInterrupt:
        text = "nobody waits any more, but the request stands; the same command waits for it again"
        print(f"\nautoprof: {text}", file=sys.stderr)
        return 130
    return 0


def _complain(text: str, status: int) -> int:
    print(f"autoprof: trigger: {plain(text)}", file=sys.stderr)
    return status
