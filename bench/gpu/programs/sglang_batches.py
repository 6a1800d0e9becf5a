"""SGLang's server with random weights: four requests, one after the other."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from typing import Any

from bench.gpu.programs import tiny
from bench.gpu.programs.common import arguments, say

_START_S = 120
GENERATE = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True},
}


def ask(port: int, path: str, body: dict[str, Any] | None = None, timeout_s: float = 30) -> bytes:
    """Send a request and return the answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data=data, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        found: bytes = answer.read()
        return found


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(server: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            ask(port, "/health", timeout_s=5)
            return
        except OSError:
            time.sleep(1)
    raise SystemExit(f"the server did not answer within {_START_S} s")


def main() -> None:
    parsed = arguments(model="model")
    tokens = tiny.tokenizer()
    tiny.model(tokens, "cuda").save_pretrained(parsed.model)
    tokens.save_pretrained(parsed.model)
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", parsed.model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--mem-fraction-static", "0.3", "--disable-cuda-graph"]
    server = subprocess.Popen(command, env=os.environ | {"AUTOPROF": os.environ.get("SERVER_AUTOPROF", "1")})
    try:
        wait_for(server, port)
        answers = [json.loads(ask(port, "/generate", GENERATE)) for _ in range(4)]
        time.sleep(5)  # the last trace is written
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    say(tokens=sum(len(answer["output_ids"]) for answer in answers))


if __name__ == "__main__":
    main()
