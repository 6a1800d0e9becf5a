"""`autoprof open`: serves a run's report and the merged trace of a step on this machine, and prints where they are."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import webbrowser
from pathlib import Path

from autoprof.base import files
from autoprof.base.redact import plain
from autoprof.cli import arguments, console
from autoprof.cli.console import complain
from autoprof.cli.documents import Opened
from autoprof.report import build
from autoprof.report.build import Request
from autoprof.report.page import html
from autoprof.report.page.server import PERFETTO, PERFETTO_PORT, Content, PortTaken, Server
from autoprof.rundir.file_names import MERGED, META, REPORT, RUN, STEP, tidy
from autoprof.rundir.layout import RunDir
from autoprof.rundir.runs import NotFound, Run, Step
from autoprof.traces import merge_step
from autoprof.traces.reader import TraceError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_run(parser)
    parser.add_argument("--step", type=int, metavar="N", help="the step of the trace (default: the last captured one)")
    parser.add_argument(
        "--port",
        type=_port,
        default=PERFETTO_PORT,
        help=f"port on 127.0.0.1, 0 for a free one (default: {PERFETTO_PORT}; Perfetto follows links to no other)",
    )
    parser.add_argument("--no-browser", action="store_true", help="print the addresses, start no browser")
    arguments.add_dir(parser)
    arguments.add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Serve until Ctrl-C, and return the exit status."""
    found = arguments.find_run(parsed)
    try:
        server = Server(parsed.port)
    except OSError as error:
        return complain(_no_port(parsed.port, error), 1)
    with server:
        # stdout is left to the document.
        with contextlib.redirect_stdout(sys.stderr if parsed.json else sys.stdout):
            told = fill(server, found, parsed.step)
        if not told:
            return complain(f"open: there is neither a report nor a trace of {found.id} to show", 1)
        try:
            if parsed.json:
                console.print_json(_opened(server, found, parsed.step))
                sys.stdout.flush()
            else:
                print(*told, "Ctrl-C ends it", sep="\n", flush=True)
            if not parsed.no_browser and _has_browser():
                webbrowser.open(server.link_once())
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def fill(server: Server, run: Run, number: int | None) -> list[str]:
    """Make what is missing or too old, hand it to the server, and return lines that say where it is, if anything.

    Raises:
        NotFound: Nothing is known of the step.
    """
    items, told = [], []
    step = _step(run, number)
    report = _report(run)
    if report is not None:
        server.contents[REPORT] = Content(kind="text/html; charset=utf-8", file=report)
        items.append(html.report_item())
        told.append(f"report: {server.url(REPORT)}")
    trace = _trace(run, step) if step is not None else None
    if step is not None and trace is not None:
        name = f"{tidy(run.id)}-step{step.number}.json.gz"
        server.contents[name] = Content(kind="application/gzip", file=trace, for_perfetto=True)
        items.append(html.trace_item(run.id, step.number, name))
        told.append(f"step {step.number} in Perfetto: {_way(server, name)}")
    elif step is None:
        told.append("no step was captured; --step N shows what the timeline has of one")
    if not items:
        return []
    server.contents[""] = html.index_page(run.id, items)
    return [f"both: {server.url()}" if len(items) > 1 else f"page: {server.url()}", *told]


def _opened(server: Server, run: Run, number: int | None) -> Opened:
    """Return what is served as a document."""
    trace = next((name for name in server.contents if name not in ("", REPORT)), None)
    step = _step(run, number)
    return Opened(
        run=run.id,
        url=server.url(),
        report=server.url(REPORT) if REPORT in server.contents else None,
        trace=server.url(trace) if trace is not None else None,
        step=step.number if step is not None and trace is not None else None,
    )


def _way(server: Server, name: str) -> str:
    """Say how Perfetto gets at a trace."""
    if server.server_port == PERFETTO_PORT:
        return f"{PERFETTO}/#!/?url={server.url(name)}"
    return f"by the button of the page; its own links work with port {PERFETTO_PORT} only"


def _report(run: Run) -> Path | None:
    """Return the run's report, made where it is missing or older than what it tells of."""
    request = Request(run=run)
    folder = Path(run.path)
    told = [folder / RUN, *RunDir(folder).lines("timeline"), *folder.glob(f"{STEP}*/*{META}")]
    if _older(request.page, [path for path in told if not path.name.startswith(MERGED)]):
        try:
            files.open_as(run.path)
            with console.reading() as progress:
                figures = build.report_figures(request, progress)
            html.write(figures, request.page)
        except (html.MissingExtra, OSError) as error:
            complain(f"open: no report: {error}", 1)
            return None
    return request.page


def _trace(run: Run, step: Step) -> Path | None:
    """Return the step's merged trace, made where it is missing or older than what it is made of."""
    try:
        work = merge_step.of_step(run, step, merge_step.Wishes())
        folder = Path(run.path)
        parts = [
            *(each.path for each in work.taken),
            *RunDir(folder).lines("timeline"),
            *RunDir(folder).lines("clocks"),
        ]
        # An earlier autoprof gave a part of the step the name of the whole.
        if _older(work.made, parts) or not merge_step.is_current(work):
            with console.bar("merging", work.bytes) as advance:
                lines = list(merge_step.do(work, progress=advance))
            print(*map(plain, lines), sep="\n")
    except (NotFound, TraceError, OSError) as error:
        complain(f"open: no trace of step {step.number}: {error}", 1)
        return None
    return work.made


def _step(run: Run, number: int | None) -> Step | None:
    """Return the step that was asked for, or the last captured one."""
    if number is not None:
        return merge_step.chosen(run, number)
    return run.steps[-1] if run.steps else None


def _older(made: Path, parts: list[Path]) -> bool:
    """Return whether a file is not there, or older than one of those it is made of."""
    try:
        when = made.stat().st_mtime_ns
    except OSError:
        return True
    return any(part.stat().st_mtime_ns > when for part in parts if part.is_file())


def _has_browser() -> bool:
    """Return whether there is a desktop to show a page on: not where somebody is logged in over the network."""
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")) and "SSH_CONNECTION" not in os.environ


def _no_port(port: int, error: OSError) -> str:
    if not isinstance(error, PortTaken):
        return f"open: port {port}: {error.strerror}"
    if port == PERFETTO_PORT:
        return (
            f"open: port {port} is taken, maybe by another autoprof open or trace_processor, and Perfetto follows "
            "links to no other; end what uses it, or take --port 0: then a button of the page hands over the trace"
        )
    return f"open: port {port} is taken; --port 0 takes a free one"


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: a number from 0 to 65535")
    return int(text)
