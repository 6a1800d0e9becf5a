"""TRL's GRPO with a vLLM server: both run with autoprof, and the server records the trainer's steps."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from tests.real.assets import tiny_model
from tests.support import engines, processes, servers
from tests.support.helpers import assert_no_failure, clean_environment, problems
from tests.support.servers import serve
from tests.support.trl_runs import SCRIPT, Ran

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """Start `vllm serve` as TRL needs it; without a trainer it would record its second batch."""
    folder = tmp_path_factory.mktemp("server")
    yield from serve(folder, AUTOPROF="1", AUTOPROF_STEPS="2", VLLM_SERVER_DEV_MODE="1")


@pytest.fixture(scope="module")
def run(server: servers.Server, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Train four steps, the third captured, with three evaluations."""
    folder = tmp_path_factory.mktemp("trainer")
    places = {"SERVER": server.url, "MODEL": tiny_model()}
    path = engines.one_package("trl-1.16.0", "trl", folder / "path")
    environment = clean_environment(PYTHONPATH=path, AUTOPROF="1", AUTOPROF_STEPS="3", AUTOPROF_LOG="info", **places)
    finished = processes.run([sys.executable, str(SCRIPT), "served"], cwd=folder, env=environment, timeout_s=300)
    assert finished.status == 0, finished.output[-8000:]
    assert f"step 3: its rollout is in the run of {server.url}, " in finished.output
    return Ran(folder, finished.output)


def test_the_server_records_the_trainers_step_instead_of_its_own_batch(run: Ran, server: servers.Server) -> None:
    assert server.steps() == [3]
    # Four answers of eight tokens, generated together, or less so on a slow machine.
    assert server.passes(3) in range(8, 33)
    clock = server.meta(3)["clock"]
    (generation,) = [span for span in run.spans() if (span["name"], span["step"]) == ("generate", 3)]
    assert generation["start_ns"] < clock["start"]["unix_ns"] < clock["stop"]["unix_ns"] < generation["end_ns"]


def test_all_batches_of_the_server_are_on_its_timeline(run: Ran, server: servers.Server) -> None:
    # Four batches of the steps, and three evaluations of two batches each.
    assert [span["step"] for span in server.spans()] == list(range(1, 11))


def test_the_trainers_own_stages_are_captured(run: Ran) -> None:
    assert run.steps() == [3]
    metas = [json.loads(path.read_text()) for path in run.run.glob("global_step_000003/*.meta.json")]
    assert {meta["state"] for meta in metas} == {"complete"}
    stages = {meta["stage"] for meta in metas}
    assert stages >= {"compute_reward", "update_actor", "optimizer_step"}
    assert "rollout" not in {meta["role"] for meta in metas}
    assert problems(run.run) == []


def test_autoprof_has_no_error(run: Ran, server: servers.Server) -> None:
    assert server.errors() == []
    assert_no_failure(run.run)
