"""`autoprof open`: serves a run's report and the merged trace of a step on this machine, and prints their addresses.

The server listens on 127.0.0.1 only. Other users of the machine can connect too, but they don't know the path, so they
get no content. If autoprof starts a browser, other users can read the command line of the browser. So the link in the
command line works only once. A foreign web page can point its host name to 127.0.0.1 (DNS rebinding). So HTTP requests
for other host names are refused.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import html as markup
import os
import re
import secrets
import shutil
import socketserver
import string
import sys
import threading
import webbrowser
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec

from autoprof.base import files
from autoprof.base.redact import plain
from autoprof.cli import arguments, console
from autoprof.cli.console import complain
from autoprof.cli.documents import Opened
from autoprof.report import build, html
from autoprof.report.build import ReportRequest
from autoprof.report.html import PERFETTO, TEMPLATES, script_sources, trace_name
from autoprof.rundir.file_names import MERGED, META, REPORT, RUN, STEP
from autoprof.rundir.layout import RunDir
from autoprof.rundir.runs import NotFound, Run, Step
from autoprof.traces import clocks, merge_step, timeline
from autoprof.traces.reader import TraceError

# The only port of this machine that Perfetto's pages may load from (its Content-Security-Policy,
# ui/src/frontend/index.ts; tools/open_trace_in_ui uses this port for the same reason).
PERFETTO_PORT = 9001
_HOSTS = ("127.0.0.1", "localhost")
_PRIVACY_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """Content that the server sends: a text, or the content that a file has at the time of the HTTP request.

    Attributes:
        kind: The media type of the content.
        text: The text. It is used if `file` is not set.
        file: The path of the file.
        policy: The content security policy. If empty, none is sent.
        for_perfetto: True if Perfetto's pages may read the content.
    """

    kind: str
    text: str = ""
    file: Path | None = None
    policy: str = ""
    for_perfetto: bool = False


class Server(ThreadingHTTPServer):
    """Web server that serves `contents` until it is closed.

    Attributes:
        contents: Dict from the name of each content in the URL to the content. The name of the first page is `""`.
            Contents may be added after the server was created.
        make: Function that returns the content with a name that `contents` lacks, or None. Its contents are kept.
    """

    daemon_threads = True
    # No other process may listen on the same port.
    allow_reuse_port = False

    def __init__(self, port: int) -> None:
        """Listen on a port of 127.0.0.1. If `port` is 0, listen on a free port.

        Raises:
            OSError: Another program listens on the port, or this user may not listen on it.
        """
        self.contents: dict[str, Content] = {}
        self.make: Callable[[str], Content | None] = lambda name: None
        self._making = threading.Lock()
        self._path = f"/{secrets.token_urlsafe(18)}/"
        self._once = ""
        super().__init__(("127.0.0.1", port), _PageHandler)

    def server_bind(self) -> None:
        """Bind the socket. Unlike HTTPServer, do not look up the name of this machine."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def link_once(self) -> str:
        """Return a new link to the first page. The link works only once."""
        self._once = f"/{secrets.token_urlsafe(18)}"
        return f"http://127.0.0.1:{self.server_port}{self._once}"

    def redeem(self, path: str) -> bool:
        """Return True if a path belongs to the link that works only once. After that, the link no longer works."""
        expected, given = self._once.encode(), path.encode()
        if not expected or not secrets.compare_digest(given, expected):
            return False
        self._once = ""
        return True

    def url(self, name: str = "") -> str:
        """Return the URL of the content with a name."""
        return f"http://127.0.0.1:{self.server_port}{self._path}{name}"

    def find(self, path: str) -> Content | None:
        """Return the content at a path. Return None if the path is unknown."""
        if not secrets.compare_digest(path[: len(self._path)].encode(), self._path.encode()):
            return None
        name = path[len(self._path) :]
        if name not in self.contents:
            with self._making:
                if name not in self.contents and (content := self.make(name)) is not None:
                    self.contents[name] = content
        return self.contents.get(name)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors that occur when a browser has disconnected or sends a malformed HTTP request."""


class _PageHandler(BaseHTTPRequestHandler):
    server: Server
    # Seconds after which a connection without data is closed, so that it does not occupy a thread.
    timeout = 30
    server_version = "autoprof"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(send_body=True)

    def do_HEAD(self) -> None:
        self._answer(send_body=False)

    def _refuse_method(self) -> None:
        self._send_status(HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self, send_body: bool) -> None:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or _name(hosts[0]) not in _HOSTS:
            self._send_status(HTTPStatus.FORBIDDEN)
            return
        content = self.server.find(self.path)
        if content is None and send_body and self.server.redeem(self.path):
            self._send_status(HTTPStatus.FOUND, {"Location": self.server.url()})
        elif content is None:
            self._send_status(HTTPStatus.NOT_FOUND)
        elif content.file is None:
            encoded_text = content.text.encode()
            self._head(content, len(encoded_text))
            if send_body:
                self.wfile.write(encoded_text)
        else:
            self._send(content, content.file, send_body)

    def _send(self, content: Content, path: Path, send_body: bool) -> None:
        try:
            descriptor = files.opened(path)
        except OSError:
            self._send_status(HTTPStatus.NOT_FOUND)
            return
        with open(descriptor, "rb") as file:
            self._head(content, os.fstat(descriptor).st_size)
            if send_body:
                shutil.copyfileobj(file, self.wfile, 1 << 20)

    def _head(self, content: Content, size: int) -> None:
        extra_headers = {"Content-Security-Policy": content.policy} if content.policy else {}
        if content.for_perfetto:
            extra_headers |= {"Access-Control-Allow-Origin": PERFETTO, "Vary": "Origin"}
        self._send_status(HTTPStatus.OK, {"Content-Type": content.kind, **extra_headers}, size)

    def _send_status(self, status: HTTPStatus, headers: dict[str, str] | None = None, size: int = 0) -> None:
        self.send_response(status)
        for name, value in (_PRIVACY_HEADERS | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()


def _name(host: str) -> str:
    name, _, port = host.partition(":")
    return name if port.isdecimal() or not port else ""


def trace_item(run: str, step: str, name: str) -> str:
    """Return the HTML of the list item for the trace of a step. The server serves the trace under `name`."""
    return (
        f'<li><button type="button" data-perfetto="{PERFETTO}" data-trace="{markup.escape(name)}" '
        f'data-title="{markup.escape(f"{run}, step {step}")}">Open step {step} in Perfetto</button> '
        f'or <a href="{markup.escape(name)}" download>download its trace</a></li>'
    )


def index_page(run: str, items: list[str]) -> Content:
    """Return the first page of `autoprof open`. The page may load data from this server only.

    Args:
        run: The id of the run.
        items: The HTML of the list items on the page.
    """
    script = (TEMPLATES / "perfetto.js").read_text(encoding="utf-8")
    template = string.Template((TEMPLATES / "index.html").read_text(encoding="utf-8"))
    text = template.substitute(run=markup.escape(run), items="\n".join(items), script=script)
    allowed_sources = f"{script_sources(script)}; connect-src 'self'; style-src 'unsafe-inline'; img-src data:"
    policy = f"default-src 'none'; {allowed_sources}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return Content(kind="text/html; charset=utf-8", text=text, policy=policy)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_run(parser)
    parser.add_argument("--step", type=int, metavar="N", help="the step of the trace (default: the last captured one)")
    arguments.add_loop(parser, "the loop of the step")
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
            lines = fill(server, chosen_run, parsed.step, parsed.loop)
        if not lines:
            return complain(f"open: {chosen_run.id} has neither a report nor a trace to show", 1)
        try:
            if parsed.json:
                console.print_json(_opened(server, chosen_run, _step(chosen_run, parsed.step, parsed.loop)))
                sys.stdout.flush()
            else:
                print(*lines, "Ctrl-C ends it", sep="\n", flush=True)
            if not parsed.no_browser and _has_browser():
                webbrowser.open(server.link_once())
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def fill(server: Server, run: Run, number: int | None, loop: int | None = None) -> list[str]:
    """Add the report of a run and the merged trace of a step to the server.

    If one of these files is missing or outdated, write the file first. `number` is the number of the step; None for the
    last captured step. `loop` is the loop of the step, if several loops have the step.

    Returns:
        Output lines with the addresses. Empty if there is neither a report nor a trace.

    Raises:
        NotFound: The run has no step with this number, or several loops have it.
    """
    items, lines = [], []
    step = _step(run, number, loop)
    report = _report(run)
    if report is not None:
        server.contents[REPORT] = Content(kind="text/html; charset=utf-8", file=report)
        items.append(f'<li><a href="{REPORT}">The report</a>: where the time went</li>')
        lines.append(f"report: {server.url(REPORT)}")
    trace = _trace(run, step) if step is not None else None
    if step is not None and trace is not None:
        name = trace_name(run.id, step.number, step.loop)
        server.contents[name] = _trace_content(trace)
        items.append(trace_item(run.id, step.label, name))
        lines.append(f"step {step.label} in Perfetto: {_perfetto_text(server, name)}")
    elif step is None:
        lines.append("no step was captured; --step N shows a step from the timeline")
    if not items:
        return []
    server.contents[""] = index_page(run.id, items)
    server.make = lambda name: _other_trace(run, name)
    return [f"both: {server.url()}" if len(items) > 1 else f"page: {server.url()}", *lines]


def _opened(server: Server, run: Run, step: Step | None) -> Opened:
    """Return the document with the addresses that the server offers."""
    name = trace_name(run.id, step.number, step.loop) if step is not None else ""
    trace = name if name and name in server.contents else None
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


def _trace(run: Run, step: Step, tell: Callable[[str], object] = print) -> Path | None:
    """Return the path of the step's merged trace. Write the trace first if it is missing or older than its parts.

    Return None if the trace can't be written. `tell` is called with each line about a new trace.
    """
    try:
        work = merge_step.plan_step_merge(run, step, merge_step.MergeOptions())
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
            for line in lines:
                tell(plain(line))
    except (NotFound, TraceError, OSError) as error:
        complain(f"open: no trace of step {step.label}: {error}", 1)
        return None
    return work.output


def _trace_content(trace: Path) -> Content:
    return Content(kind="application/gzip", file=trace, for_perfetto=True)


# The numbers of the loop and of the step in a name that `trace_name` makes.
_NUMBERS = re.compile(r"(?:-loop([0-9]{1,6}))?-step([0-9]{1,9})\.json\.gz$")


def _other_trace(run: Run, name: str) -> Content | None:
    """Return the merged trace of another step of the report, which the button of this step asks for.

    Return None if no step of the run has a trace with this name.
    """
    numbers = _NUMBERS.search(name)
    if numbers is None or name != trace_name(run.id, step := int(numbers[2]), loop := int(numbers[1] or 1)):
        return None
    try:
        trace = _trace(run, merge_step.chosen(run, step, loop), tell=lambda line: None)
    except NotFound:
        return None
    return None if trace is None else _trace_content(trace)


def _step(run: Run, number: int | None, loop: int | None) -> Step | None:
    """Return the step with this number. Without a number, return the last captured step, of the loop if it is given."""
    if number is not None:
        return merge_step.chosen(run, number, loop)
    attempts = timeline.attempts_of(run)
    if loop is not None and loop not in (attempts.loops or {1}):
        raise NotFound(f"{run.id} has no loop {loop}; its loops: {', '.join(attempts.titles.values()) or 'loop 1'}")
    steps = clocks.steps_by_loop(run.steps, attempts) if run.steps else []
    return next((step for step in reversed(steps) if loop in (None, step.loop)), None)


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
    if error.errno != errno.EADDRINUSE:
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
