"""Inference server started from its command line, requests to it over HTTP, and a reader of its run directory."""

from __future__ import annotations

import gzip
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from tests.real.assets import tiny_model
from tests.support import helpers, processes, servers
from tests.support.helpers import ROOT, clean_environment, processes_of

START_S = 240


class Server:
    """Running server and its run directory."""

    def __init__(self, folder: Path, port: int, forward: str) -> None:
        """Args:
        folder: Working directory of the server.
        port: Port of the server.
        forward: Prefix of the name of the trace event that occurs once in each forward pass.
        """
        self.folder = folder
        self.url = f"http://127.0.0.1:{port}"
        self._forward = forward

    def post(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
        """Send a request, and return the status and content of the answer. A body other than bytes is sent as JSON."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data or None, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, _content(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _content(error.read())

    @contextmanager
    def streaming(self, path: str, body: Any) -> Iterator[HTTPResponse]:
        """Request a streamed answer, and yield it after its first line. Leaving the context closes the connection."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=json.dumps(body).encode(), headers=headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.readline().startswith(b"data: ")
            yield response

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def run(self) -> Path:
        return self.folder / "autoprof_runs" / "latest"

    def steps(self) -> list[int]:
        return sorted(int(path.name.rpartition("_")[2]) for path in self.run().glob("global_step_*"))

    def meta(self, step: int) -> dict[str, Any]:
        """Wait until the window of a step is closed, and return the meta file of its only worker."""
        folder = self.run() / f"global_step_{step:06d}"
        deadline = time.monotonic() + 30
        while not (found := _of_worker(folder, "*.meta.json")) and time.monotonic() < deadline:
            time.sleep(0.05)
        (path,) = found
        return json.loads(path.read_text())

    def passes(self, step: int) -> int:
        """Return the number of forward passes in the only complete trace of a step's worker."""
        assert self.meta(step)["state"] == "complete"
        (trace,) = _of_worker(self.run() / f"global_step_{step:06d}", "rollout.replica0.*.gz")
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        return sum(str(event.get("name")).startswith(self._forward) for event in events)

    def spans(self) -> list[dict[str, Any]]:
        """Return the spans of steps in the timeline."""
        return [span for span in helpers.spans(self.run()) if span["kind"] == "step"]

    def batch_since(self, begin_ns: int) -> int:
        """Wait until a generation batch that began after this time has ended, and return the number of the first.

        Raises:
            AssertionError: No such batch ended within 30 s.
        """
        deadline = time.monotonic() + 30
        while not (since := [span["step"] for span in self.spans() if span["start_ns"] > begin_ns]):
            assert time.monotonic() < deadline, self.spans()
            time.sleep(0.05)
        return int(min(since))

    def errors(self) -> list[Any]:
        """Return autoprof's own errors, and the hooks that failed."""
        found = []
        for process in processes_of(self.run()):
            found += process["errors"].items()
            found += [key for key, hook in process["hooks"].items() if hook["state"] == "failed"]
        return found


def _of_worker(folder: Path, pattern: str) -> list[Path]:
    return [path for path in folder.glob(pattern) if ".frontend." not in path.name]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def running(server: Server, command: list[str], environment: dict[str, str]) -> Iterator[Server]:
    """Start a server, yield it once it is healthy, and end it after the tests."""
    with processes.progress(server.folder.name.removesuffix("0")):
        tag = uuid.uuid4().hex
        log = server.folder / "server.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=server.folder,
                env=environment | {processes.TAG: tag},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            deadline = time.monotonic() + START_S
            while not server.healthy():
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.5)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            processes.end_all(tag, process.pid, grace_s=15)
            process.wait()


def _content(data: bytes) -> Any:
    try:
        return json.loads(data or b"null")
    except ValueError:
        return data.decode(errors="replace")


def serve(folder: Path, **variables: str) -> Iterator[servers.Server]:
    """Start `vllm serve`, yield the server once it is healthy, and end it after the tests."""
    port = servers.free_port()
    command = [str(Path(sys.executable).with_name("vllm")), "serve", tiny_model()]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--max-model-len", "512", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
    command += ["--kv-cache-memory-bytes", "33554432"]
    environment = clean_environment(
        # vLLM's command line looks for a distribution named vllm; the CPU wheel has another name.
        PYTHONPATH=str(ROOT / "examples" / "verl_cpu" / "cpu"),
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        TORCH_COMPILE_DISABLE="1",
        OMP_NUM_THREADS="1",
        **variables,
    )
    yield from servers.running(servers.Server(folder, port, "execute_"), command, environment)
