from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..released import as_released, fault, swallows
from ._profiler_path_creator import ProfPathCreator

_HERE = "torch_npu.profiler.profiler"
_FLAGS = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


class profile:
    @as_released(_HERE, "profile.__init__")
    def __init__(self, **arguments: Any) -> None:
        if fault("init"):
            raise RuntimeError("aclInit failed")
        self.arguments = arguments
        self.folder: Path | None = None

    @swallows
    def start(self) -> None:
        if fault("start"):
            raise RuntimeError("the NPU is busy")
        self.folder = ProfPathCreator().create()
        (self.folder / "FRAMEWORK").mkdir()

    @swallows
    def stop(self) -> None:
        if self.folder is None:
            raise RuntimeError("it was not started")
        if fault("stop"):
            raise OSError("no space left on device")
        rank = os.environ.get("RANK")
        config = self.arguments.get("experimental_config")
        common = {name: self.arguments.get(name, False) for name in _FLAGS}
        common["activities"] = [str(activity) for activity in self.arguments["activities"]]
        info = {"common_config": common, "experimental_config": config.arguments if config else None}
        name = "profiler_info.json" if rank is None else f"profiler_info_{rank}.json"
        (self.folder / name).write_text(json.dumps({"config": info}))
        self.arguments["on_trace_ready"](self)

    @swallows
    def add_metadata_json(self, key: str, value: str) -> None:
        if self.folder is None:
            raise RuntimeError("it was not started")
        (self.folder / "profiler_metadata.json").write_text(json.dumps({key: json.loads(value)}))

    @swallows
    def step(self) -> None:
        """Do nothing, as without a schedule."""

    @swallows
    def __enter__(self) -> profile:
        self.start()
        return self

    @swallows
    def __exit__(self, *_: object) -> None:
        self.stop()


@swallows
@as_released(_HERE, "tensorboard_trace_handler")
def tensorboard_trace_handler(
    dir_name: str | None = None, worker_name: str | None = None, analyse_flag: bool = True, async_mode: bool = False
) -> Callable[[profile], None]:
    ProfPathCreator().init(worker_name=worker_name, dir_name=dir_name)

    def handler(profiler: profile) -> None:
        if analyse_flag:
            analyse(str(profiler.folder))

    return handler


@swallows
@as_released(_HERE, "analyse")
def analyse(profiler_path: str, max_process_number: int = 1, export_type: str | None = None) -> None:
    if fault("analyse"):
        raise RuntimeError("msprof was not found")
    output = Path(profiler_path, "ASCEND_PROFILER_OUTPUT")
    output.mkdir()
    (info,) = Path(profiler_path).glob("profiler_info*.json")
    config = json.loads(info.read_text())["config"]["experimental_config"] or {}
    # In newer releases, Text writes a database too.
    if "Text" in config.get("export_type", "Text"):
        (output / "trace_view.json").write_text("[]")
    else:
        (output / "ascend_pytorch_profiler_0.db").write_bytes(b"SQLite format 3")
