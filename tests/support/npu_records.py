"""Recordings made with the stand-in of torch_npu."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autoprof.capture import recorder
from autoprof.capture.artifacts import Subject
from autoprof.run import end
from autoprof.run.runtime import Runtime

SUBJECT = Subject(step=2, role="actor", stage="update_actor", rank=3)


def record(run: Runtime) -> dict[str, Any]:
    """Capture a stage and return its meta file."""
    recording = recorder.begin(run, SUBJECT)
    assert recording is not None
    recording.stop()
    return meta_file(run)


def meta_file(run: Runtime) -> dict[str, Any]:
    end.wait_for_files(run)
    (path,) = run.rundir.path.rglob("*.meta.json")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def folder_of(run: Runtime) -> Path:
    (folder,) = run.rundir.path.rglob("*_ascend_pt")
    return folder


def recorded(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the common and the experimental options that torch_npu was given."""
    (info,) = folder.glob("profiler_info*.json")
    config = json.loads(info.read_text())["config"]
    return config["common_config"], config["experimental_config"]
