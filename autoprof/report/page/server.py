"""Web server of `autoprof open` for one user of this machine. It serves a few pages and files under a secret path.

The server listens on 127.0.0.1 only. Other users of the machine can connect too, but they don't know the path, so they
get no content. If autoprof starts a browser, other users can read the command line of the browser. So the link in the
command line works only once. A foreign web page can point its host name to 127.0.0.1 (DNS rebinding). So HTTP requests
for other host names are refused.
"""

from __future__ import annotations

import errno
import html as markup
import os
import secrets
import shutil
import socketserver
import string
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec

from autoprof.base import files
from autoprof.report.page.html import TEMPLATES, script_sources
from autoprof.rundir.file_names import REPORT

# The only port of this machine that Perfetto's pages may load from (its Content-Security-Policy,
# ui/src/frontend/index.ts; tools/open_trace_in_ui uses this port for the same reason).
PERFETTO_PORT = 9001
PERFETTO = "https://ui.perfetto.dev"
_HOSTS = ("127.0.0.1", "localhost")
_PRIVACY_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PortTaken(OSError):
    """The port can't be used, because another program listens on it."""


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
    """

    daemon_threads = True
    # No other process may listen on the same port.
    allow_reuse_port = False

    def __init__(self, port: int) -> None:
        """Listen on a port of 127.0.0.1. If `port` is 0, listen on a free port.

        Raises:
            PortTaken: Another program listens on the port.
            OSError: This user may not listen on the port.
        """
        self.contents: dict[str, Content] = {}
        self._path = f"/{secrets.token_urlsafe(18)}/"
        self._once = ""
        try:
            super().__init__(("127.0.0.1", port), _PageHandler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(error.errno, f"port {port} is taken") from error
            raise

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
        return self.contents.get(path[len(self._path) :])

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors that occur when a browser has disconnected or sends a malformed HTTP request."""


class _PageHandler(BaseHTTPRequestHandler):
    server: Server
    # Seconds after which a connection without data is closed, so that it does not occupy a thread.
    timeout = 30
    server_version = "autoprof"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _refuse_method(self) -> None:
        self._say(HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self, body: bool) -> None:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or _name(hosts[0]) not in _HOSTS:
            self._say(HTTPStatus.FORBIDDEN)
            return
        content = self.server.find(self.path)
        if content is None and body and self.server.redeem(self.path):
            self._say(HTTPStatus.FOUND, {"Location": self.server.url()})
        elif content is None:
            self._say(HTTPStatus.NOT_FOUND)
        elif content.file is None:
            encoded_text = content.text.encode()
            self._head(content, len(encoded_text))
            if body:
                self.wfile.write(encoded_text)
        else:
            self._send(content, content.file, body)

    def _send(self, content: Content, path: Path, body: bool) -> None:
        try:
            descriptor = files.opened(path)
        except OSError:
            self._say(HTTPStatus.NOT_FOUND)
            return
        with open(descriptor, "rb") as file:
            self._head(content, os.fstat(descriptor).st_size)
            if body:
                shutil.copyfileobj(file, self.wfile, 1 << 20)

    def _head(self, content: Content, size: int) -> None:
        extra_headers = {"Content-Security-Policy": content.policy} if content.policy else {}
        if content.for_perfetto:
            extra_headers |= {"Access-Control-Allow-Origin": PERFETTO, "Vary": "Origin"}
        self._say(HTTPStatus.OK, {"Content-Type": content.kind, **extra_headers}, size)

    def _say(self, status: HTTPStatus, headers: dict[str, str] | None = None, size: int = 0) -> None:
        self.send_response(status)
        for name, value in (_PRIVACY_HEADERS | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()


def _name(host: str) -> str:
    name, _, port = host.partition(":")
    return name if port.isdecimal() or not port else ""


def report_item() -> str:
    """Return the HTML of the list item that links to the report."""
    return f'<li><a href="{REPORT}">The report</a>: where the time went</li>'


def trace_item(run: str, step: int, name: str) -> str:
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
    script = (TEMPLATES / "index.js").read_text(encoding="utf-8")
    template = string.Template((TEMPLATES / "index.html").read_text(encoding="utf-8"))
    text = template.substitute(run=markup.escape(run), items="\n".join(items), script=script)
    allowed_sources = f"{script_sources(script)}; connect-src 'self'; style-src 'unsafe-inline'; img-src data:"
    policy = f"default-src 'none'; {allowed_sources}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return Content(kind="text/html; charset=utf-8", text=text, policy=policy)
