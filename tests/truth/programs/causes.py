"""Causes of lost time that a user's program may have. Each is a function that takes the seconds to lose."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

LOCK = threading.Lock()


def sleeping_driver(seconds: float) -> None:
    time.sleep(seconds)


def load_batch(seconds: float) -> list[str]:
    """Read a batch from a slow store, in small parts."""
    end, batch = time.perf_counter() + seconds, []
    while time.perf_counter() < end:
        time.sleep(0.01)
        batch.append("row")
    return batch


def import_late(seconds: float) -> None:
    """Import a module that takes long."""
    Path("slow_module.py").write_text(f"import time\ntime.sleep({seconds})\n")
    sys.path.insert(0, os.getcwd())
    importlib.import_module("slow_module")


def collect_garbage(seconds: float) -> None:
    """Let the garbage collector traverse many objects, as often as it takes."""
    kept = [[number] for number in range(1_000_000)]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        gc.collect()
    del kept


def wait_for_lock(seconds: float) -> None:
    """Wait for a lock that another thread holds."""

    def hold() -> None:
        with LOCK:
            held.set()
            time.sleep(seconds)

    held = threading.Event()
    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    with LOCK:
        pass


def write_results(seconds: float) -> None:
    """Write into a FIFO whose reader comes late, like a write to a disk that hangs."""
    path = Path(f"results-{os.getpid()}")
    os.mkfifo(path)
    reader = subprocess.Popen(["sh", "-c", f"sleep {seconds}; cat {path} > /dev/null"])
    path.write_text("results\n")
    reader.wait()


def log_metrics(seconds: float) -> None:
    """Send the metrics to a server that answers late."""

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(seconds)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/log") as answer:
        answer.read()
    server.shutdown()


def stopped(seconds: float) -> None:
    """Let another process stop this one by SIGSTOP, as a debugger or a freezer does."""
    end = time.perf_counter() + seconds
    pid = os.getpid()
    subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"], start_new_session=True)
    while time.perf_counter() < end:
        time.sleep(0.01)


def out_of_memory(seconds: float) -> None:
    """Ask torch for more memory than the machine has."""
    import torch

    time.sleep(seconds)
    torch.empty(1 << 50, dtype=torch.uint8)


def ignored(_: float) -> None:
    """Lose nothing."""


CAUSES: dict[str, Callable[[float], object]] = {
    "sleep": sleeping_driver,
    "data": load_batch,
    "import": import_late,
    "gc": collect_garbage,
    "lock": wait_for_lock,
    "disk": write_results,
    "http": log_metrics,
    "stopped": stopped,
    "oom": out_of_memory,
    "": ignored,
}
