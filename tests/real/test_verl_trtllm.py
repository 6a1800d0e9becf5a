"""autoprof's requests to the TensorRT-LLM server of verl 0.9.1.

The server's class is verl's own. Its engine is a fake, because TensorRT-LLM can only be imported on a GPU machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes
from tests.support.helpers import clean_environment

_SCRIPT = """
import asyncio, json, sys
from types import SimpleNamespace
from verl.workers.rollout.trtllm_rollout.trtllm_async_server import TRTLLMHttpServer

class Engine:
    calls = []
    async def collective_rpc(self, method, *args, **kwargs):
        if fails == method:
            raise RuntimeError("no such method")
        self.calls.append(method)
        return [None, None]

server = object.__new__(TRTLLMHttpServer.__ray_metadata__.modified_class)
server.llm, server.profiler_controller = Engine(), SimpleNamespace(
    check_enable=lambda: True, check_this_rank=lambda: True
)
fails, answers = "", []

def ask(action):
    request = {"action": action, "global_step": 7, "replica": 1, "rank": 2, "overrides": {}}
    answers.append(asyncio.run(server.start_profile(autoprof=request)))

ask("start"); ask("start"); ask("stop"); ask("stop")
asyncio.run(server.start_profile(global_step=3))
fails = "start_profile"
ask("start"); ask("stop")
print(json.dumps({"answers": answers, "calls": Engine.calls}))
"""


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Return the server's answers and its calls to the engine, and the run directory."""
    folder = tmp_path_factory.mktemp("trtllm")
    environment = clean_environment(AUTOPROF="1", AUTOPROF_DIR=str(folder))
    finished = processes.run([sys.executable, "-c", _SCRIPT], cwd=folder, env=environment, timeout_s=120)
    assert finished.status == 0, finished.output
    return json.loads(finished.output.splitlines()[-1]), folder / "latest"


def test_the_workers_own_start_and_stop_are_called(asked: Any) -> None:
    result, _ = asked
    # The last call comes from verl's own request.
    assert result["calls"] == ["start_profile", "stop_profile", "start_profile"]


def test_the_server_answers_with_the_problem(asked: Any) -> None:
    result, _ = asked
    assert [answer["problem"] for answer in result["answers"]] == [
        "",
        "its workers are started already",
        "",
        "its workers were not started",
        "RuntimeError: no such method",
        "its workers were not started",
    ]


def test_the_meta_file_refers_to_nsight_systems(asked: Any) -> None:
    _, run = asked
    (path,) = (run / "global_step_000007").iterdir()
    assert path.name.startswith("rollout.replica1.engine.")
    meta = json.loads(path.read_text())
    assert (meta["state"], meta["step"], meta["replica"], meta["rank"]) == ("failed", 7, 1, 2)
    assert "Nsight Systems" in meta["reason"]
    assert meta["clock"]["start"]["unix_ns"] <= meta["clock"]["stop"]["unix_ns"]
