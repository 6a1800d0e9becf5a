"""verl's own SGLang server with a real engine of each release: the timeline has its requests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.support import engines, processes
from tests.support.helpers import ROOT, clean_environment, processes_of, spans

HERE = Path(__file__).parent
SCRIPTS = HERE / "sglang_scripts"


@pytest.fixture(scope="module", params=[name for name in engines.NAMES if name.startswith("sglang-")])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Send three concurrent requests, and return the spans of the timeline."""
    verl = importlib.util.find_spec("verl")
    assert verl is not None
    assert verl.origin is not None
    python = engines.python_of(request.param)
    folder = tmp_path_factory.mktemp("sglang-verl")
    environment = clean_environment(
        PYTHONPATH=f"{HERE / 'sglang_cpu'}:{ROOT / 'examples' / 'verl_cpu' / 'cpu'}",
        SGLANG_USE_CPU_ENGINE="1",
        SGLANG_CPU_OMP_THREADS_BIND="0",
        TORCHDYNAMO_DISABLE="1",
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        VERL_PLATFORM="cpu",
        VERL_USE_EXTERNAL_MODULES="verl_cpu_platform",
    )
    model = folder / "model"
    made = processes.run([python, str(SCRIPTS / "model.py"), str(model)], cwd=folder, env=environment, timeout_s=120)
    assert made.status == 0, made.output[-4000:]
    command = [python, str(SCRIPTS / "verl_server.py"), str(model), str(Path(verl.origin).parents[1])]
    settings = {"AUTOPROF": "1", "AUTOPROF_STEPS": ""}
    finished = processes.run(command, cwd=folder, env=environment | settings, timeout_s=300)
    assert finished.status == 0, finished.output[-4000:]
    assert "RESULT [4, 5, 6]" in finished.output
    run = folder / "autoprof_runs" / "latest"
    assert [process["errors"] for process in processes_of(run) if process["errors"]] == []
    return spans(run)


def test_each_request_is_on_the_timeline_with_replica_and_tokens(found: list[dict[str, Any]]) -> None:
    requests = sorted((span for span in found if span["kind"] == "request"), key=lambda span: span["ids"]["request"])
    assert [span["ids"] for span in requests] == [{"replica": 3, "request": f"request{number}"} for number in range(3)]
    assert [span["counts"] for span in requests] == [
        {"prompt_tokens": 3 + number, "response_tokens": 4 + number} for number in range(3)
    ]
    assert {(span["name"], span["role"]) for span in requests} == {("generate", "rollout")}


def test_requests_of_verls_server_are_not_counted_as_batches(found: list[dict[str, Any]]) -> None:
    assert {span["kind"] for span in found} == {"request"}
