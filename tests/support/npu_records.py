"""Recordings made with the stand-in of torch_npu."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autoprof.run import end
from autoprof.run.runtime import Runtime
from tests.support.captures import begun


def record(run: Runtime) -> dict[str, Any]:
    """Capture a stage and return its meta file."""
    begun(run).stop()
    return meta_file(run)


def meta_file(run: Runtime) -> dict[str, Any]:
    end.wait_for_files(run)
    (path,) = run.rundir.path.rglob("*.meta.json")
    return json.loads(path.read_text())


def folder_of(run: Runtime) -> Path:
    (folder,) = run.rundir.path.rglob("*_ascend_pt")
    return folder


def recorded(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the common and the experimental options that torch_npu was given."""
    (info,) = folder.glob("profiler_info*.json")
    config = json.loads(info.read_text())["config"]
    return config["common_config"], config["experimental_config"]
