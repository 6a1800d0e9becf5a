"""`autoprof trigger`: opens a window in a running run, or switches autoprof on or off in it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from autoprof.base import units
from autoprof.base.redact import plain
from autoprof.cli import arguments, console
from autoprof.cli.console import complain
from autoprof.cli.documents import Folder, Triggered
from autoprof.cli.trigger_access import Contents, OnDisk, RunAccess, View, find_in_ray
from autoprof.config.settings import WINDOW_FIELDS
from autoprof.run import cluster
from autoprof.run.cluster import Gone
from autoprof.windows import requests
from autoprof.windows.requests import Became, Trigger

# Seconds without a change after which a file counts as abandoned.
_FILE_S = 120.0
# Seconds after which a folder of torch_npu counts as abandoned. The analysis of the folder takes up to an hour, and may
# not change the folder meanwhile.
_FOLDER_S = 3700.0
# Seconds after which a file or folder counts as abandoned once the run has ended. Then only a process that outlived the
# run could still write.
_AFTER_S = 15.0
# Maximum number of consecutive looks that do not find the request: a listing may miss a file that is renamed meanwhile.
_MAX_LOOKS_WITHOUT_REQUEST = 10


class GaveUp(Exception):
    """The awaited traces will not be written. The message gives the reason."""


def wait_for_files(access: RunAccess, trigger: Trigger, document: Triggered, keep_stdout: bool = False) -> None:
    """Show the progress of a request until its traces are written, then print their folders.

    Args:
        access: The access to the run.
        trigger: The requested windows.
        document: The document for `--json`, to which the results are added.
        keep_stdout: True to print nothing to stdout.

    Raises:
        GaveUp: Some or all traces will not be written.
        Gone: The run can no longer be reached.
        KeyboardInterrupt: The user pressed Ctrl-C.
    """
    total = 0 if trigger.at else trigger.steps
    with console.lines(total, keep_stdout) as show:
        became = _wait_for_windows(access, document.request, show, total)
        views, abandoned = _wait_until_written(access, became.captured, show)
    folders = _folders(views)
    problems = list(_problems(folders, became.captured, abandoned))
    document.captured, document.problems, document.reason = became.captured, problems, became.reason
    document.folders = [
        Folder(
            step, host, contents.folder, len(contents.captures), sum(size for *_, size in contents.captures.values())
        )
        for step, hosts in folders.items()
        for host, contents in hosts
    ]
    if not keep_stdout:
        _print_folders(document, views[0].host)
    if became.reason:
        raise GaveUp(f"steps captured: {', '.join(map(str, became.captured)) or 'none'}; {became.reason}")
    if problems:
        raise GaveUp("not all captures are complete; see autoprof doctor RUN")


def _wait_for_windows(access: RunAccess, name: str, show: console.Show, total: int) -> Became:
    """Wait until all windows of the request have closed, and return the state of the request."""
    looks_without_request = 0
    while True:
        view = access.look()[0]
        became = view.became(name)
        if became is None:
            exists = name in view.requests
            looks_without_request = 0 if exists else looks_without_request + 1
            if looks_without_request > _MAX_LOOKS_WITHOUT_REQUEST:
                raise GaveUp("the request is gone: its file was removed")
            show("waiting for a step to begin" if exists else "taken", 0)
        elif became.state == "refused":
            raise GaveUp(f"the request was refused: {became.reason}")
        else:
            _show_progress(became, show, total)
            if became.over:
                return became
        if not view.alive:
            if became is not None and became.captured:
                became.reason = "the run has ended"
                return became
            raise GaveUp("the run has ended" + (" before the request was taken" if became is None else ""))
        if view.off:
            raise GaveUp("autoprof is switched off in the run; the request stays open, and --on resumes it")
        time.sleep(access.pause_s)


def _show_progress(became: Became, show: console.Show, total: int) -> None:
    """Show which steps are captured, and which step is being captured."""
    for count, step in enumerate(became.captured, 1):
        show(f"step {step} is captured{f' ({count} of {total})' if total > 1 else ''}", count)
    if became.going_on is not None:
        show(f"step {became.going_on} is being captured", len(became.captured))
    elif became.state == "taken":
        show("taken; waiting for its first step", 0)


def _wait_until_written(access: RunAccess, steps: Sequence[int], show: console.Show) -> tuple[list[View], list[str]]:
    """Wait until all files of the steps have their final names or are abandoned.

    Returns:
        The views of the run, and the paths of the abandoned files: they are not complete, but no longer change.
    """
    last_changes: dict[str, tuple[object, float]] = {}
    while True:
        views = access.look(steps)
        now = time.monotonic()
        unfinished = {
            f"{contents.folder}/{name}": state
            for view in views
            for contents in view.steps.values()
            for name, state in contents.unfinished.items()
        }
        growing_paths = []
        for path, state in unfinished.items():
            unchanged_since = last_changes[path][1] if path in last_changes and last_changes[path][0] == state else now
            last_changes[path] = state, unchanged_since
            patience_s = (_FOLDER_S if state[2] else _FILE_S) if views[0].alive else _AFTER_S
            if now - unchanged_since < patience_s:
                growing_paths.append(path)
        if not growing_paths:
            return views, sorted(unfinished)
        show(f"files that are still being written: {len(growing_paths)}", len(steps))
        time.sleep(access.pause_s)


def _folders(views: Sequence[View]) -> dict[int, list[tuple[str, Contents]]]:
    """Return the folders of each step: dict from step to list of host and content of the folder.

    A folder that several hosts share appears once. Two hosts share a folder if they see the same captures, because the
    name of a capture contains its host.
    """
    folders: dict[int, list[tuple[str, Contents]]] = {}
    for view in views:
        for step, contents in sorted(view.steps.items()):
            step_folders = folders.setdefault(step, [])
            names = contents.captures.keys()
            if not step_folders or (names and all(names != other.captures.keys() for _, other in step_folders)):
                step_folders.append((view.host, contents))
    return folders


def _problems(
    folders: dict[int, list[tuple[str, Contents]]], steps: Sequence[int], abandoned: Sequence[str]
) -> Iterator[str]:
    if steps and not any(contents.captures for hosts in folders.values() for _, contents in hosts):
        yield "none of the steps has a capture"
    for step, hosts in folders.items():
        for _, contents in hosts:
            for name, (state, reason, _) in contents.captures.items():
                if state != "complete":
                    yield f"step {step}, {name}: {state}{f', {reason}' if reason else ''}"
    for path in abandoned:
        yield f"{path}: it is incomplete and no longer grows"


def _print_folders(document: Triggered, trainer_host: str) -> None:
    """Print the problems, the number of captures, and the folders.

    If a host other than `trainer_host` has a folder, print the host of each folder.
    """
    for problem in document.problems:
        print(plain(problem), flush=True)
    count, size = (sum(getattr(folder, name) for folder in document.folders) for name in ("captures", "bytes"))
    print(f"captures: {count}, {units.size(size)}", flush=True)
    has_other_hosts = any(folder.host != trainer_host for folder in document.folders)
    for folder in document.folders:
        print(plain(f"{folder.host}:{folder.path}" if has_other_hosts else folder.path), flush=True)


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
        return complain(
            f"trigger: --{switch} switches the whole run; it can't be combined with --wait or options of a window", 2
        )
    answer = AnswerForm(parsed.wait, parsed.json)
    try:
        if parsed.ray is None:
            return _send(OnDisk(arguments.find_run(parsed)), trigger, switch, answer)
        with arguments.cluster(parsed.ray, "--ray") as ray:
            return _send(find_in_ray(ray, parsed.name), trigger, switch, answer)
    except OSError as error:
        return complain(
            f"trigger: {error.filename}: {error.strerror}; only users who may write there can send requests", 1
        )
    except cluster.Lost as error:
        complain(f"trigger: {error}", 1)
        sys.stdout.flush()
        # Skip Ray's exit handlers: they would wait for its head, which is gone.
        os._exit(1)
    except cluster.Unreachable as error:
        return complain(f"trigger: --ray: {error}", 1)
    except (Gone, GaveUp) as error:
        return complain(f"trigger: {error}", 1)


class AnswerForm(NamedTuple):
    """The form in which the command answers.

    Attributes:
        wait: True to wait for the traces before the answer.
        as_json: True to print a document to stdout. All other output then goes to stderr.
    """

    wait: bool
    as_json: bool

    def say(self, text: str) -> None:
        """Print a line to stdout. If `as_json` is true, print it to stderr."""
        print(text, file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def end(self, document: Triggered) -> int:
        """If `as_json` is true, print the document. Return the exit status 0."""
        if self.as_json:
            console.print_json(document)
        return 0


def _send(access: RunAccess, trigger: Trigger, switch: str, answer: AnswerForm) -> int:
    (view,) = access.look()
    if not view.alive:
        return complain(f"trigger: run {access.id} is not running: {access.ended}", 1)
    if switch:
        access.switch(switch == "off")
        answer.say(f"autoprof is switched {switch} in run {access.id} from the next step on")
        return answer.end(Triggered(run=access.id, off=switch == "off"))
    if answer.wait and view.off:
        off = f"autoprof is switched off in run {access.id}, so no request was sent; switch it on first, with --on"
        return complain(f"trigger: {off}", 1)
    open_request = view.open_request(trigger)
    name = open_request or access.ask(trigger)
    path = os.path.join(access.control, name)
    if open_request:
        answer.say(f"{access.title} has been asked for {trigger} already, in {path}; using that request")
    else:
        answer.say(f"asked {access.title} for {trigger}, in {path}")
    document = Triggered(run=access.id, request=name, joined=bool(open_request), off=view.off)
    return _follow(access, trigger, document, answer)


def _follow(access: RunAccess, trigger: Trigger, document: Triggered, answer: AnswerForm) -> int:
    """If `--wait` is set, wait for the traces of the request. Return the exit status."""
    if not answer.wait:
        answer.say("a run reads requests when a step begins; a server without a trainer when a request arrives")
        if document.off:
            answer.say("autoprof is switched off in the run: nothing is captured until it is switched on, with --on")
        return answer.end(document)
    try:
        wait_for_files(access, trigger, document, keep_stdout=answer.as_json)
    except KeyboardInterrupt:
        text = "the request stays open; run the same command to wait for it again"
        print(file=sys.stderr)
        return complain(text, 130)
    except GaveUp as error:
        document.reason = document.reason or str(error)
        answer.end(document)
        raise
    return answer.end(document)
