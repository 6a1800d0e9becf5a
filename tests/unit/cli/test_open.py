"""`autoprof open`: what it gives out, to whom, and how it ends. Requests are real, over loopback."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autoprof.cli import main, open
from autoprof.cli.open import Content, Server
from autoprof.report import html
from autoprof.rundir import runs as run_reader
from tests.support import helpers, report_runs

PERFETTO = "https://ui.perfetto.dev"
Say = Callable[..., "tuple[int, dict[str, str], bytes]"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run, of which steps 2 and 3 have a trace."""
    parent = tmp_path_factory.mktemp("runs")
    run = parent / "20261122-010203-abcdef"
    script = report_runs.write(run, steps=3, captured=3)
    who = {"role": "actor", "stage": "update_actor", "rank": 0}
    when = script.stages[2, "update_actor"]
    report_runs.capture(run, 2, "actor.update_actor.rank0", who, ("n1", 200), when, report_runs.training(when))
    (parent / "latest").symlink_to(run.name)
    return parent


@contextmanager
def opened(runs: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A real `autoprof open` and the lines that it printed; it is ended by Ctrl-C, and must then end well."""
    process = helpers.started(
        [sys.executable, "-m", "autoprof", "open", "--dir", str(runs), "--no-browser", *arguments]
    )
    lines = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            lines.append(line.strip())
            if line.startswith("Ctrl-C"):
                break
        assert lines[-1:] == ["Ctrl-C ends it"], process.communicate()[1]
        yield process, lines
        process.send_signal(signal.SIGINT)
        rest, complaints = process.communicate(timeout=30)
        assert (process.returncode, complaints) == (0, ""), rest
    finally:
        process.kill()
        process.communicate()


def ask(url: str, method: str = "GET", path: str | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a request to the server of `url`."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=30)
    try:
        connection.putrequest(method, parts.path if path is None else path, skip_host=True)
        for name, value in ({"Host": parts.netloc} | headers).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def page_of(lines: list[str]) -> str:
    (url,) = [line.split(": ", 1)[1] for line in lines if re.match(r"(both|page): ", line)]
    return url


def test_it_serves_the_trace_to_perfetto_and_ends_with_ctrl_c(runs: Path) -> None:
    with opened(runs, "--port", "0") as (_process, lines):
        page = page_of(lines)
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{24}/", page)
        status, headers, body = ask(page)
        assert status == 200
        assert "Access-Control-Allow-Origin" not in headers
        (name,) = re.findall(r'data-trace="([^"]+)"', body.decode())
        assert name == "20261122-010203-abcdef-step3.json.gz"
        status, headers, body = ask(page + name, Origin=PERFETTO)
        assert (status, headers["Access-Control-Allow-Origin"]) == (200, PERFETTO)
        assert len(body) == int(headers["Content-Length"])
        assert len(json.loads(gzip.decompress(body))["traceEvents"]) > 100
        # An existing merged trace is served unchanged.
        merged = runs / "20261122-010203-abcdef" / "global_step_000003" / "merged.pt.trace.json.gz"
        assert body == merged.read_bytes()
        status, headers, empty = ask(page + name, "HEAD")
        assert (status, headers["Content-Length"], empty) == (200, str(len(body)), b"")
        port = urllib.parse.urlsplit(page).port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port or 0), timeout=5)


def test_the_traces_of_the_other_steps_are_made_when_they_are_asked_for(runs: Path) -> None:
    run = "20261122-010203-abcdef"
    with opened(runs, run, "--port", "0", "--step", "3") as (_process, lines):
        page = page_of(lines)
        status, headers, body = ask(f"{page}{run}-step1.json.gz", Origin=PERFETTO)
        assert (status, headers["Access-Control-Allow-Origin"]) == (200, PERFETTO)
        assert json.loads(gzip.decompress(body))["traceEvents"]
        for name in ("-step4.json.gz", "-step01.json.gz", "-step-1.json.gz", "-step1", "x-step1.json.gz"):
            assert ask(f"{page}{run}{name}")[0] == 404
        assert ask(f"{page}{run}-step2.json.gz", Host="evil.example")[0] == 403
        assert ask(page, path=f"/{run}-step2.json.gz")[0] == 404


def test_another_step_and_a_trace_older_than_its_parts(runs: Path) -> None:
    folder = runs / "20261122-010203-abcdef" / "global_step_000002"
    merged = folder / "merged.pt.trace.json.gz"
    with opened(runs, "2026", "--port", "0", "--step", "2") as (_, lines):
        assert "step2.json.gz" in ask(page_of(lines))[2].decode()
    first = merged.stat().st_mtime_ns
    with opened(runs, "2026", "--port", "0", "--step", "2"):
        assert merged.stat().st_mtime_ns == first
    (part,) = folder.glob("actor.*.gz")
    os.utime(part, ns=(first + 1, first + 1))
    with opened(runs, "2026", "--port", "0", "--step", "2"):
        assert merged.stat().st_mtime_ns > first


def test_a_step_without_captures_has_its_timeline(runs: Path) -> None:
    with opened(runs, "2026", "--port", "0", "--step", "1") as (_, lines):
        page = page_of(lines)
        (name,) = re.findall(r'data-trace="([^"]+)"', ask(page)[2].decode())
        assert "step1.json.gz" in name
        events = json.loads(gzip.decompress(ask(page + name)[2]))["traceEvents"]
        assert "update_actor" in {event.get("name") for event in events}
        assert b"</html>" in ask(page + "report.html")[2]


def test_a_report_older_than_what_it_tells_of(runs: Path) -> None:
    report = runs / "20261122-010203-abcdef" / "report.html"
    with opened(runs, "--port", "0"):
        first = report.stat().st_mtime_ns
    with opened(runs, "--port", "0"):
        assert report.stat().st_mtime_ns == first
    timeline = next((report.parent / "journal").glob("*.jsonl"))
    os.utime(timeline, ns=(first + 1, first + 1))
    with opened(runs, "--port", "0"):
        assert report.stat().st_mtime_ns > first


def test_names_of_runs_stay_text(tmp_path: Path) -> None:
    run = tmp_path / "é <script>alert(1)<&>"
    report_runs.write(run, steps=1, captured=1)
    with Server(0) as server:
        told = open.fill(server, run_reader.read(run), None)
    text = server.contents[""].text
    assert text.count("<script>") == 1
    assert "Run é &lt;script&gt;alert(1)&lt;&amp;&gt;</h1>" in text
    assert all(re.fullmatch(r"[\w.-]*", name, re.ASCII) for name in server.contents)
    assert len(told) == 3


def test_a_run_without_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with Server(0) as server:
        told = open.fill(server, run_reader.read(tmp_path / "run"), None)
    assert told[-1] == "no step was captured; --step N shows a step from the timeline"
    assert set(server.contents) == {"", "report.html"}


def test_without_the_extra_the_trace_is_shown_all_the_same(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    html._environment.cache_clear()
    run = tmp_path / "run"
    report_runs.write(run, steps=1, captured=1)
    with Server(0) as server:
        open.fill(server, run_reader.read(run), None)
    assert set(server.contents) == {"", "run-step1.json.gz"}
    assert "pip install 'autoprof-rl[report]'" in capsys.readouterr().err


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(0) as made:
        made.contents[""] = Content(kind="text/html", text="<p>page</p>", policy="default-src 'none'")
        thread = threading.Thread(target=made.serve_forever, args=[0.02])
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.1:80", "localhost:9001"])
def test_this_machine_may_be_called_so(server: Server, host: str) -> None:
    status, headers, body = ask(server.url(), Host=host)
    assert (status, body) == (200, b"<p>page</p>")
    assert headers["Content-Security-Policy"] == "default-src 'none'"
    assert (headers["Cache-Control"], headers["X-Content-Type-Options"]) == ("no-store", "nosniff")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:9001", "", "[::1]"])
def test_other_names_for_this_machine_are_refused(server: Server, host: str) -> None:
    status, _, body = ask(server.url(), Host=host)
    assert (status, body) == (403, b"")


def test_a_second_host_is_refused(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
        path = urllib.parse.urlsplit(server.url()).path
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n".encode())
        assert b" 403 " in connection.recv(100)


@pytest.mark.parametrize(
    "path",
    ["/", "/index.html", "/x", "{}run.json", "{}../run.json", "{}..%2frun.json", "{}?x", "{}/", "//127.0.0.1{}", "/é"],
)
def test_nothing_else_is_there(server: Server, path: str) -> None:
    own = urllib.parse.urlsplit(server.url()).path
    status, headers, body = ask(server.url(), path=urllib.parse.quote(path.format(own), safe="/%?."))
    assert (status, body) == (404, b"")
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_nothing_can_be_sent(server: Server, method: str) -> None:
    status, headers, body = ask(server.url(), method)
    assert (status, headers["Allow"], body) == (405, "GET, HEAD", b"")


def test_a_link_in_place_of_the_trace_is_not_followed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "trace.gz").symlink_to(tmp_path / "secret")
    server.contents["t.gz"] = Content(kind="application/gzip", file=tmp_path / "trace.gz", for_perfetto=True)
    server.contents["gone.gz"] = Content(kind="application/gzip", file=tmp_path / "gone.gz")
    assert ask(server.url("t.gz"))[0] == 404
    assert ask(server.url("gone.gz"))[0] == 404


def test_the_link_for_the_browser_works_once(server: Server) -> None:
    """Others on this machine see the command line of the browser that is started."""
    link = server.link_once()
    assert urllib.parse.urlsplit(server.url()).path.strip("/") not in link
    assert ask(link, Host="evil.example")[0] == 403
    assert ask(link, "HEAD")[0] == 404
    status, headers, body = ask(link)
    assert (status, headers["Location"], body) == (302, server.url(), b"")
    assert ask(link)[0] == 404
    assert ask(server.url(), path="/")[0] == 404


def test_nobody_is_asked_what_this_machine_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that does not answer would keep the command waiting."""
    asked: list[str] = []
    monkeypatch.setattr(socket, "getfqdn", asked.append)
    with Server(0):
        assert asked == []


def test_the_browser_is_given_the_link_that_works_once(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(open, "_has_browser", lambda: True)
    monkeypatch.setattr("webbrowser.open", shown.append)
    monkeypatch.setattr(Server, "serve_forever", lambda _: None)
    assert main.main(["open", "--dir", str(runs), "--port", "0"]) == 0
    page = page_of(capsys.readouterr().out.splitlines())
    assert len(shown) == 1
    assert urllib.parse.urlsplit(page).path not in shown[0]


def test_who_goes_away_in_the_middle_disturbs_nobody(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(64 << 20)
    server.contents["large"] = Content(kind="application/gzip", file=tmp_path / "large")
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
        path = urllib.parse.urlsplit(server.url("large")).path
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        connection.recv(100)
    assert ask(server.url())[0] == 200
    assert capfd.readouterr().err == ""


def test_it_listens_on_loopback_alone(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_a_port_that_is_taken(runs: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["open", "--dir", str(runs), "--no-browser", "--port", str(server.server_port)]) == 1
    assert f"port {server.server_port} is in use; --port 0 chooses a free one" in capsys.readouterr().err


def test_perfettos_port_that_is_taken(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", 9001))
            other.listen()
        except OSError:
            pass  # something else here has it: as good
        assert main.main(["open", "--dir", str(runs), "--no-browser"]) == 1
    said = capsys.readouterr().err
    assert "port 9001 is in use" in said
    assert "--port 0" in said


@pytest.mark.parametrize("port", ["-1", "65536", "x", ""])
def test_what_is_no_port(runs: Path, port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["open", f"--port={port}"]) == 2
    assert "a number from 0 to 65535" in capsys.readouterr().err


def test_a_step_that_is_not_there(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["open", "--dir", str(runs), "--port", "0", "--step", "9"]) == 1
    assert "no step 9; there are 2, 3" in capsys.readouterr().err
