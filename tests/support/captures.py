"""Subject of a capture, work to record, and a reader of the finished files."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoprof.capture import recorder
from autoprof.capture.artifacts import Subject
from autoprof.run import end
from autoprof.run.runtime import Runtime
from autoprof.rundir import file_names
from tests.support import packages
from tests.support.helpers import TORCH

torch = packages.package("torch")
if "torch" not in packages.LACKING:
    # As in `helpers.TORCH`.
    torch._lazy_modules.discard("_inductor")

SUBJECT = Subject(step=2, role="actor", stage="update_actor", rank=3)


def work() -> None:
    x = torch.randn(20, 20, requires_grad=True)
    (x @ x).sum().backward()


# First lines of a program that begins and ends a capture itself.
PROGRAM = f"""
{TORCH}
from autoprof.capture import recorder
from autoprof.capture.artifacts import Subject
from autoprof.run import runtime
run = runtime.start()
subject = Subject(step=2, role="actor", stage="update_actor", rank=3)
"""


def begun(run: Runtime, subject: Subject = SUBJECT) -> Any:
    """Begin a capture, which nothing prevents."""
    capture = recorder.begin(run, subject)
    assert capture is not None
    return capture


def captured(run: Runtime, do: Callable[[], object] = work) -> tuple[dict[str, Any], Any]:
    """Capture some work, and return the meta file and the trace of the run's only capture."""
    capture = begun(run)
    do()
    capture.stop()
    ((meta, trace),) = finished(run).values()
    return meta, trace


def finished(run: Runtime) -> dict[str, tuple[dict[str, Any], dict[str, Any] | None]]:
    """Wait until all files are complete, and return the meta file and the trace of each capture by name."""
    deadline = time.monotonic() + 120  # other processes may be compressing, one at a time
    # A symlink that a test planted never goes away.
    while [path for path in run.rundir.parts() if not path.is_symlink()] and time.monotonic() < deadline:
        time.sleep(0.02)
    end.wait_for_files(run)
    found = {}
    for path in run.rundir.path.rglob("*.meta.json"):
        trace = Path(str(path).replace(file_names.META, file_names.TRACE))
        content = json.loads(gzip.decompress(trace.read_bytes())) if trace.exists() else None
        found[path.name.removesuffix(file_names.META)] = (json.loads(path.read_text()), content)
    return found


def job(folder: Path, content: str | bytes = "{}", **more: Any) -> dict[str, Any]:
    """Write a recording into `folder`, and return the finisher's job for it."""
    raw = folder / "raw.part"
    raw.write_bytes(content.encode() if isinstance(content, str) else content)
    files = {"raw": str(raw), "trace": str(folder / "x.gz"), "meta_path": str(folder / "x.meta.json")}
    return files | {"meta": {"state": "complete", "reason": ""}, "max_bytes": 1000} | more
