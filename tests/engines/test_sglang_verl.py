"""verl's own SGLang server with a real engine of each release: the timeline has its requests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.support import engines
from tests.support.helpers import ROOT, assert_no_failure, spans

SCRIPTS = Path(__file__).parent / "sglang_scripts"


@pytest.fixture(scope="module", params=[name for name in engines.NAMES if name.startswith("sglang-")])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Send three concurrent requests, and return the spans of the timeline."""
    verl = importlib.util.find_spec("verl")
    assert verl is not None
    assert verl.origin is not None
    folder = tmp_path_factory.mktemp("sglang-verl")
    engine = engines.Engine(
        request.param,
        folder,
        PYTHONPATH=str(ROOT / "examples" / "verl_cpu" / "cpu"),
        VERL_PLATFORM="cpu",
        VERL_USE_EXTERNAL_MODULES="verl_cpu_platform",
    )
    arguments = (engine.model, str(Path(verl.origin).parents[1]))
    finished = engine.run(SCRIPTS / "verl_server.py", *arguments, AUTOPROF="1", AUTOPROF_STEPS="")
    assert "RESULT [4, 5, 6]" in finished.output
    run = folder / "autoprof_runs" / "latest"
    assert_no_failure(run)
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
