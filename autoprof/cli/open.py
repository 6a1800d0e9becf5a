"""`autoprof open`: serves a run's report and the merged trace of a step on this machine, and prints their addresses."""

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
from autoprof.report.build import ReportRequest
from autoprof.report.page import html
from autoprof.report.page.server import (
    PERFETTO,
    PERFETTO_PORT,
    Content,
    PortTaken,
    Server,
    index_page,
    report_item,
    trace_item,
)
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
        help=f"port on 127.0.0.1, 0 for a free one (default: {PERFETTO_PORT}; Perfetto follows links to it only)",
    )
    parser.add_argument("--no-browser", action="store_true", help="print the addresses without starting a browser")
    arguments.add_dir(parser)
    arguments.add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Serve until Ctrl-C, and return the exit status."""
    chosen_run = arguments.find_run(parsed)
    try:
        server = Server(parsed.port)
    except OSError as error:
        return complain(_no_port(parsed.port, error), 1)
    with server:
        # If --json is set, only the document goes to stdout.
        with contextlib.redirect_stdout(sys.stderr if parsed.json else sys.stdout):
            lines = fill(server, chosen_run, parsed.step)
        if not lines:
            return complain(f"open: {chosen_run.id} has neither a report nor a trace to show", 1)
        try:
            if parsed.json:
                console.print_json(_opened(server, chosen_run, parsed.step))
                sys.stdout.flush()
            else:
                print(*lines, "Ctrl-C ends it", sep="\n", flush=True)
            if not parsed.no_browser and _has_browser():
                webbrowser.open(server.link_once())
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def fill(server: Server, run: Run, number: int | None) -> list[str]:
    """Add the report of a run and the merged trace of a step to the server.

    If one of these files is missing or outdated, write the file first. `number` is the number of the step; None for the
    last captured step.

    Returns:
        Output lines with the addresses. Empty if there is neither a report nor a trace.

    Raises:
        NotFound: The run has no step with this number.
    """
    items, lines = [], []
    step = _step(run, number)
    report = _report(run)
    if report is not None:
        server.contents[REPORT] = Content(kind="text/html; charset=utf-8", file=report)
        items.append(report_item())
        lines.append(f"report: {server.url(REPORT)}")
    trace = _trace(run, step) if step is not None else None
    if step is not None and trace is not None:
        name = f"{tidy(run.id)}-step{step.number}.json.gz"
        server.contents[name] = Content(kind="application/gzip", file=trace, for_perfetto=True)
        items.append(trace_item(run.id, step.number, name))
        lines.append(f"step {step.number} in Perfetto: {_perfetto_text(server, name)}")
    elif step is None:
        lines.append("no step was captured; --step N shows a step from the timeline")
    if not items:
        return []
    server.contents[""] = index_page(run.id, items)
    return [f"both: {server.url()}" if len(items) > 1 else f"page: {server.url()}", *lines]


def _opened(server: Server, run: Run, number: int | None) -> Opened:
    """Return the document with the addresses that the server offers."""
    trace = next((name for name in server.contents if name not in ("", REPORT)), None)
    step = _step(run, number)
    return Opened(
        run=run.id,
        url=server.url(),
        report=server.url(REPORT) if REPORT in server.contents else None,
        trace=server.url(trace) if trace is not None else None,
        step=step.number if step is not None and trace is not None else None,
    )


def _perfetto_text(server: Server, name: str) -> str:
    """Return the link that opens a trace in Perfetto.

    If Perfetto does not follow links to the server's port, return a hint how to open the trace.
    """
    if server.server_port == PERFETTO_PORT:
        return f"{PERFETTO}/#!/?url={server.url(name)}"
    return f"use the page's button; Perfetto follows links to port {PERFETTO_PORT} only"


def _report(run: Run) -> Path | None:
    """Return the path of the run's report. Write the report first if it is missing or older than the run's files.

    Return None if the report can't be written.
    """
    request = ReportRequest(run=run)
    folder = Path(run.path)
    sources = [folder / RUN, *RunDir(folder).lines("journal"), *folder.glob(f"{STEP}*/*{META}")]
    if _is_outdated(request.page, [path for path in sources if not path.name.startswith(MERGED)]):
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
    """Return the path of the step's merged trace. Write the trace first if it is missing or older than its parts.

    Return None if the trace can't be written.
    """
    try:
        work = merge_step.of_step(run, step, merge_step.MergeOptions())
        folder = Path(run.path)
        parts = [
            *(trace.path for trace in work.inputs),
            *RunDir(folder).lines("journal"),
            *RunDir(folder).lines("clocks"),
        ]
        # Earlier versions of autoprof wrote a merged trace with only a part of the step under the same name.
        if _is_outdated(work.output, parts) or not merge_step.is_current(work):
            with console.bar("merging", work.bytes) as advance:
                lines = list(merge_step.do(work, progress=advance))
            print(*map(plain, lines), sep="\n")
    except (NotFound, TraceError, OSError) as error:
        complain(f"open: no trace of step {step.number}: {error}", 1)
        return None
    return work.output


def _step(run: Run, number: int | None) -> Step | None:
    """Return the step with this number. Without a number, return the last captured step, if any."""
    if number is not None:
        return merge_step.chosen(run, number)
    return run.steps[-1] if run.steps else None


def _is_outdated(output: Path, parts: list[Path]) -> bool:
    """Return True if the file `output` is missing, or older than one of the files `parts` from which it is made."""
    try:
        output_ns = output.stat().st_mtime_ns
    except OSError:
        return True
    return any(part.stat().st_mtime_ns > output_ns for part in parts if part.is_file())


def _has_browser() -> bool:
    """Return True if a browser can show a page here: there is a display, and this is not an SSH session."""
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")) and "SSH_CONNECTION" not in os.environ


def _no_port(port: int, error: OSError) -> str:
    if not isinstance(error, PortTaken):
        return f"open: port {port}: {error.strerror}"
    if port == PERFETTO_PORT:
        return (
            f"open: port {port} is in use, maybe by another autoprof open or trace_processor, and Perfetto follows "
            "links to this port only; end that program, or use --port 0: then a button of the page opens the trace"
        )
    return f"open: port {port} is in use; --port 0 chooses a free one"


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give a number from 0 to 65535")
    return int(text)
