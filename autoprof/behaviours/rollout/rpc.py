"""Engines whose workers have a start and a stop of their own, called by name in all of them (`collective_rpc`).

autoprof does not record there, and places nothing: what the workers do when they are started is theirs. Those of
TensorRT-LLM mark a range for Nsight Systems (`torch.cuda.profiler.start`, tensorrt_llm/llmapi/rlhf_utils.py, from pull
request 11493 on), which only a process that runs under `nsys profile --capture-range=cudaProfilerApi` heeds.
"""

from __future__ import annotations

import asyncio
from typing import Any

from autoprof.behaviours.rollout import engine
from autoprof.behaviours.rollout.request import ROLE, Request
from autoprof.capture.artifacts import Artifacts
from autoprof.capture.profilers.torch import TorchTool
from autoprof.run import runtime

# Set on an engine while its workers are started for autoprof: the artifacts whose meta file is written at the stop.
_OPEN = "_autoprof_open"


class _Elsewhere(TorchTool):
    """Tool of a capture that is recorded elsewhere: its meta file has no trace."""

    name = "none"


class Server(engine.Server, kw_only=True):
    """A method of the server actor (`rollout.engine.Server`) of an engine with an awaitable `collective_rpc(method)`.

    A capture leaves a meta file without a trace, which says where the recording is instead.

    Attributes:
        kept: Where the workers' own recordings are, for the meta file.
        begin: The method of the workers that starts them.
        end: The one that stops them.
    """

    default_engine = "self.llm"

    kept: str
    begin: str = "start_profile"
    end: str = "stop_profile"

    async def start(self, engine: Any, request: Request) -> dict[str, Any]:
        run = runtime.current()
        if run is None:
            return {"problem": "autoprof is off in the server's process"}
        if hasattr(engine, _OPEN):
            return {"problem": "its workers are started already"}
        settings = request.settings(run)
        await asyncio.wait_for(engine.collective_rpc(self.begin), settings.stop_timeout_s)
        setattr(engine, _OPEN, Artifacts(run, request.subject("engine"), settings, _Elsewhere()))
        return {"problem": ""}

    async def stop(self, engine: Any) -> dict[str, Any]:
        run, place = runtime.current(), getattr(engine, _OPEN, None)
        if run is None or place is None:
            return {"problem": "its workers were not started"}
        delattr(engine, _OPEN)
        await asyncio.wait_for(engine.collective_rpc(self.end), run.settings.for_role(ROLE).stop_timeout_s)
        place.fail(f"no trace of autoprof's: {self.kept}")
        return {"problem": ""}
