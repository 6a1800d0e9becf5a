"""`autoprof open`: serves a run's report and the merged trace of a step on this machine, and prints where they are."""

from __future__ import annotations

import argparse
import html as markup
import os
import string
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoprof import _files, listing, progress
from autoprof.listing import NotFound, Run, Step
from autoprof.redaction import plain
from autoprof.report import serve
from autoprof.report.command import REPORT
from autoprof.report.policy import script_sources
from autoprof.report.serve import PERFETTO, PERFETTO_PORT, Content, Server
from autoprof.rundir import MERGED, META, tidy

_TEMPLATES = Path(__file__).parent / "report" / "templates"


def add(commands: Any, parent: Callable[[argparse.Namespace], Path]) -> argparse.ArgumentParser:
    """Add the command to those of the parser; `parent` gives the folder of the runs."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "open", help="show the report and the merged trace of a step in the browser"
    )
    parser.add_argument("name", nargs="?", metavar="RUN", default="latest", help="a run, as for ls (default: latest)")
    parser.add_argument("--step", type=int, metavar="N", help="the step of the trace (default: the last captured one)")
    parser.add_argument(
        "--port",
        type=_port,
        default=PERFETTO_PORT,
        help=f"of 127.0.0.1; 0 for any (default: {PERFETTO_PORT}, the only one from which Perfetto follows a link)",
    )
    parser.add_argument("--no-browser", action="store_true", help="only print where it is")
    parser.set_defaults(run=lambda parsed: run(parsed, parent(parsed)))
    return parser


def run(parsed: argparse.Namespace, parent: Path) -> int:
    """Serve until Ctrl-C, and return the exit status."""
    found = listing.find(parent, parsed.name)
    try:
        server = Server(parsed.port)
    except OSError as error:
        return _complain(_no_port(parsed.port, error))
    with server:
        told = fill(server, found, parsed.step)
        if not told:
            return _complain(f"open: there is neither a report nor a trace of {found.id} to show")
        try:
            for line in told:
                print(line)
            print("Ctrl-C ends it", flush=True)
            if not parsed.no_browser and _has_browser():
                webbrowser.open(server.link_once())
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def fill(server: Server, run: Run, number: int | None) -> list[str]:
    """Make what is missing or too old, hand it to the server, and say where it is; nothing where there is nothing.

    Raises:
        NotFound: Nothing is known of the step.
    """
    items, told = [], []
    step = _step(run, number)
    report = _report(run)
    if report is not None:
        server.contents[REPORT] = Content(kind="text/html; charset=utf-8", file=report)
        items.append(f'<li><a href="{REPORT}">The report</a>: where the time went</li>')
        told.append(f"report: {server.url(REPORT)}")
    trace = _trace(run, step) if step is not None else None
    if step is not None and trace is not None:
        name = f"{tidy(run.id)}-step{step.number}.json.gz"
        server.contents[name] = Content(kind="application/gzip", file=trace, for_perfetto=True)
        title = f"{run.id}, step {step.number}"
        items.append(
            f'<li><button type="button" data-perfetto="{PERFETTO}" data-trace="{markup.escape(name)}" '
            f'data-title="{markup.escape(title)}">Open step {step.number} in Perfetto</button> '
            f'or <a href="{markup.escape(name)}" download>keep its trace</a></li>'
        )
        told += _links(server, step, name)
    elif step is None:
        told.append("no step was captured; --step N shows what the timeline has of one")
    if not items:
        return []
    script = (_TEMPLATES / "open.js").read_text(encoding="utf-8")
    page = string.Template((_TEMPLATES / "open.html").read_text(encoding="utf-8"))
    text = page.substitute(run=markup.escape(run.id), items="\n".join(items), script=script)
    server.contents[""] = Content(kind="text/html; charset=utf-8", text=text, policy=_policy(script))
    return [f"both: {server.url()}" if len(items) > 1 else f"page: {server.url()}", *told]


def _links(server: Server, step: Step, name: str) -> list[str]:
    if server.server_port == PERFETTO_PORT:
        return [f"step {step.number} in Perfetto: {PERFETTO}/#!/?url={server.url(name)}"]
    return [
        f"step {step.number} in Perfetto: by the button of the page; its own links work with port {PERFETTO_PORT} only"
    ]


def _policy(script: str) -> str:
    own = f"{script_sources(script)}; connect-src 'self'; style-src 'unsafe-inline'; img-src data:"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def _report(run: Run) -> Path | None:
    """The run's report, made where it is missing or older than what it tells of."""
    from autoprof.report import html, making

    folder = Path(run.path)
    page = folder / REPORT
    told = [folder / "run.json", *folder.glob("timeline/*.jsonl"), *folder.glob(f"global_step_*/*{META}")]
    if _older(page, [path for path in told if not path.name.startswith(MERGED)]):
        try:
            _files.open_as(run.path)
            html.write(making.make(run), page)
        except (html.MissingExtra, OSError) as error:
            _complain(f"open: no report: {error}")
            return None
    return page


def _trace(run: Run, step: Step) -> Path | None:
    """The step's merged trace, made where it is missing or older than what it is made of."""
    from autoprof.traces import steps
    from autoprof.traces.reader import TraceError

    try:
        work = steps.of_step(run, step, steps.Wishes())
        folder = Path(run.path)
        parts = [*(each.path for each in work.taken), *folder.glob("timeline/*.jsonl"), *folder.glob("clocks/*.jsonl")]
        # An earlier autoprof gave a part of the step the name of the whole.
        if _older(work.made, parts) or not steps.is_current(work):
            with progress.bar("merging", work.bytes) as advance:
                lines = list(steps.do(work, progress=advance))
            print(*map(plain, lines), sep="\n")
    except (NotFound, TraceError, OSError) as error:
        _complain(f"open: no trace of step {step.number}: {error}")
        return None
    return work.made


def _step(run: Run, number: int | None) -> Step | None:
    """The step that was asked for, or the last captured one."""
    from autoprof.traces import steps

    if number is not None:
        return steps.chosen(run, number)
    return run.steps[-1] if run.steps else None


def _older(made: Path, parts: list[Path]) -> bool:
    """Whether a file is not there, or older than one of those it is made of."""
    try:
        when = made.stat().st_mtime_ns
    except OSError:
        return True
    return any(part.stat().st_mtime_ns > when for part in parts if part.is_file())


def _has_browser() -> bool:
    """Whether there is a desktop to show a page on: not where somebody is logged in over the network."""
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")) and "SSH_CONNECTION" not in os.environ


def _no_port(port: int, error: OSError) -> str:
    if not isinstance(error, serve.PortTaken):
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


def _complain(text: str) -> int:
    print(f"autoprof: {plain(text)}", file=sys.stderr)
    return 1
