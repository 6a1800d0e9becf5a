"""`vllm serve` with autoprof in front and no trainer: windows by a count of generation batches, and by request."""

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import processes
import pytest
from helpers import ROOT, clean_environment

START_S = 180


class Server:
    """A running server and what it leaves."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self._url = f"http://127.0.0.1:{port}"

    def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data=data or b"", headers=headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def generate(self, tokens: int = 6) -> str:
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        status, answer = self.post("/v1/completions", body)
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self._url + "/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def run(self) -> Path:
        return self.folder / "autoprof_runs" / "latest"

    def steps(self) -> list[int]:
        return sorted(int(path.name.rpartition("_")[2]) for path in self.run().glob("global_step_*"))

    def passes(self, step: int) -> int:
        """How many forward passes the one complete trace of a worker in a step holds."""
        folder = self.run() / f"global_step_{step:06d}"
        deadline = time.monotonic() + 30
        while not list(folder.glob("*rank0*.meta.json")) and time.monotonic() < deadline:
            time.sleep(0.05)
        (meta,) = folder.glob("*rank0*.meta.json")
        assert json.loads(meta.read_text())["state"] == "complete"
        (trace,) = folder.glob("rollout.replica0.rank0.*.gz")
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        return sum(str(event.get("name")).startswith("execute_") for event in events)


def serve(folder: Path, *options: str, **variables: str) -> Iterator[Server]:
    """A server from the command that users type, until the tests are through with it."""
    make = [sys.executable, str(ROOT / "examples" / "verl_cpu" / "make_assets.py"), str(folder)]
    subprocess.run(make, check=True, capture_output=True, timeout=120)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(folder / "data" / "model")]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--max-model-len", "64", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
    command += ["--kv-cache-memory-bytes", "33554432", *options]
    tag = uuid.uuid4().hex
    environment = clean_environment(
        # vLLM's command line looks for a distribution named vllm, which the wheel for the CPU is not.
        PYTHONPATH=str(ROOT / "examples" / "verl_cpu" / "cpu"),
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        TORCH_COMPILE_DISABLE="1",
        OMP_NUM_THREADS="1",
        **{processes.TAG: tag},
        **variables,
    )
    log = folder / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    server = Server(folder, port)
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from serve(tmp_path_factory.mktemp("serve"), AUTOPROF="1", AUTOPROF_STEPS="2,4")


@pytest.fixture(scope="module")
def batches(server: Server) -> list[str]:
    """Five generation batches: single requests, but for the fourth of three at once."""
    texts = [server.generate() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        texts += pool.map(lambda _: server.generate(12), range(3))
    return [*texts, server.generate()]


def test_the_chosen_batches_are_captured(server: Server, batches: list[str]) -> None:
    assert server.passes(2) in (6, 7)
    # Twelve tokens each: together, or one after the other where the machine is slow. The batch after it is not in it.
    assert server.passes(4) in range(12, 37)
    assert [step for step in server.steps() if step < 100] == [2, 4]
    assert len({text for text in batches if len(text) == len(batches[0])}) == 1


def test_every_batch_is_a_step_of_the_timeline(server: Server, batches: list[str]) -> None:
    lines = [line for path in server.run().glob("timeline/*.jsonl") for line in path.read_text().splitlines()]
    spans = [json.loads(line) for line in lines]
    assert [span["step"] for span in spans if span["kind"] == "step"][:4] == [1, 2, 3, 4]


def test_a_request_opens_a_window_and_may_name_the_step(server: Server, batches: list[str]) -> None:
    assert server.post("/start_profile", {"global_step": 107}) == (200, {"problem": ""})
    before = server.generate()
    assert server.generate() == before
    assert server.post("/stop_profile") == (200, {"problem": ""})
    assert server.passes(107) in range(12, 16)


def test_requests_out_of_order_are_refused_and_the_server_goes_on(server: Server, batches: list[str]) -> None:
    assert server.post("/stop_profile") == (409, {"problem": "no window was opened by /start_profile"})
    assert server.post("/start_profile", {"global_step": 108})[0] == 200
    assert server.post("/start_profile", {"global_step": 109}) == (409, {"problem": "a window is open already"})
    text = server.generate()
    assert server.post("/stop_profile")[0] == 200
    assert server.post("/stop_profile")[0] == 409
    status, answer = server.post("/start_profile", {"global_step": "x"})
    assert (status, answer["problem"]) == (400, "global_step: got 'x'; it takes a whole number from 0")
    assert server.generate() == text
    assert server.steps()[-1] == 108


def test_a_request_without_a_body_counts(server: Server, batches: list[str]) -> None:
    known = set(server.steps())
    assert server.post("/start_profile")[0] == 200
    server.generate()
    assert server.post("/stop_profile")[0] == 200
    (new,) = set(server.steps()) - known
    assert 5 < new < 100


def test_the_log_has_no_error_of_ours(server: Server, batches: list[str]) -> None:
    server.generate()
    for path in server.run().glob("hooks/*.json"):
        process = json.loads(path.read_text())
        assert process["errors"] == {}
        assert [key for key, hook in process["hooks"].items() if hook["state"] == "failed"] == []
