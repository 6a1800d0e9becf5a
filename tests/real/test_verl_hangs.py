"""Real run of verl with stuck steps, each for another cause.

While a step is stuck, `autoprof doctor` names the late process and its line. Then the step continues, and the run ends
normally.
"""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.real.run_table import TWO_DEVICES
from tests.support.helpers import autoprof
from tests.support.verl_runs import TIMEOUT_S, VerlRun, verl_run

SCRIPTS = Path(__file__).parent / "hang_scripts"
REWARD, TOOL, RANK, LOCKS, ENGINE, ITSELF = 2, 3, 4, 5, 6, 7
ROLLOUT = "actor_rollout_ref.rollout"
WHEN = '[[when]]\nwhat = "hang"\nabove = "15s"\nat_most = 9\n'


def examined(folder: Path) -> None:
    """Call doctor when each step has been stuck for long enough, and let the step continue."""
    run = folder / "autoprof_runs" / "latest"
    deadline = time.monotonic() + TIMEOUT_S
    for step in (REWARD, TOOL, RANK, LOCKS, ENGINE, ITSELF):
        hang = run / "hangs" / f"step_{step:06d}"
        # Processes write snapshots within ten seconds, so all have written theirs once the last is 20 s old.
        while time.monotonic() < deadline and not settled(hang):
            time.sleep(0.5)
        (folder / f"doctor_{step}.json").write_text(autoprof("doctor", str(run), "--json", cwd=folder).stdout)
        (folder / f"go_on_{step}").touch()


def settled(hang: Path) -> bool:
    try:
        return max(path.stat().st_mtime for path in hang.iterdir()) < time.time() - 20
    except (OSError, ValueError):
        return False


@pytest.fixture(scope="module")
def stood(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> VerlRun:
    if not request.config.getoption("thorough"):
        pytest.skip("runs with --thorough")
    folder = tmp_path_factory.mktemp("hangs")
    (folder / "autoprof.toml").write_text(WHEN)
    examiner = threading.Thread(target=examined, args=[folder], daemon=True)
    examiner.start()
    overrides = (
        *TWO_DEVICES,
        "trainer.total_training_steps=8",
        "data.max_response_length=64",
        *("actor_rollout_ref.model.external_lib=standing", "actor_rollout_ref.actor.policy_loss.loss_mode=standing"),
        f"reward.custom_reward_function.path='{SCRIPTS}/standing_reward.py'",
        *(f"{ROLLOUT}.n=2", f"{ROLLOUT}.top_k=-1", f"{ROLLOUT}.max_num_seqs=16"),
        *(f"{ROLLOUT}.multi_turn.enable=True", f"{ROLLOUT}.agent.default_agent_loop=tool_agent"),
        *(f"{ROLLOUT}.multi_turn.format=standing", f"{ROLLOUT}.multi_turn.max_assistant_turns=2"),
        f"{ROLLOUT}.multi_turn.function_tool_path='{SCRIPTS}/standing_tool.py'",
    )
    settings = {"STANDING": str(folder), "FAULTS": str(ENGINE), "AUTOPROF": "1", "AUTOPROF_STEPS": ""}
    return verl_run(folder, *overrides, packages=[SCRIPTS], **settings)


def said(run: VerlRun, step: int) -> str:
    """Return doctor's finding about a step while it was stuck."""
    report: dict[str, Any] = json.loads((run.folder / f"doctor_{step}.json").read_text())
    (found,) = [line for line in report["problems"] if line.startswith(f"step {step} has been stuck for ")]
    return str(found)


@pytest.mark.fault("a reward never returns", "continues when it returns", "nothing; doctor names the line")
def test_a_reward_that_does_not_return_is_named(stood: VerlRun) -> None:
    assert "in reward " in said(stood, REWARD)
    assert "standing_reward.py:" in said(stood, REWARD)
    assert "fetch_score" in said(stood, REWARD)


@pytest.mark.fault("a tool never returns", "continues when it returns", "nothing; doctor names tool and sample")
def test_a_tool_that_does_not_return_is_named(stood: VerlRun) -> None:
    assert " in tool search" in said(stood, TOOL)
    assert "sample " in said(stood, TOOL)


@pytest.mark.fault("one of two ranks joins no collective", "continues when it joins", "nothing; doctor names the rank")
def test_a_rank_that_does_not_join_is_named(stood: VerlRun) -> None:
    assert "actor rank 1 has not joined " in said(stood, RANK)
    assert " in update_actor; it is in standing.py:" in said(stood, RANK)


@pytest.mark.fault("two threads are in a deadlock", "continues when it is resolved", "nothing; doctor names both")
def test_a_deadlock_of_two_locks_is_named(stood: VerlRun) -> None:
    text = said(stood, LOCKS)
    assert "deadlock of two locks in " in text
    assert "update_cache" in text
    assert "score_and_cache" in text


@pytest.mark.fault("an engine's scheduler hangs", "continues when it continues", "nothing; doctor names the replica")
def test_an_engine_that_hangs_is_named(stood: VerlRun) -> None:
    assert "slow_schedule" in said(stood, ENGINE) or " waiting" in said(stood, ENGINE)


@pytest.mark.fault("a Ray actor waits for itself", "continues when it continues", "nothing; doctor names the line")
def test_an_actor_that_waits_for_itself_is_named(stood: VerlRun) -> None:
    assert (stood.folder / "asked_itself").exists()
    assert re.search(
        r"AgentLoopWorkerTQ .* waits for itself: ray.get in standing_tool.py:\d+ ask_itself asks", said(stood, ITSELF)
    )


def test_the_run_ends_as_without_faults(stood: VerlRun) -> None:
    assert sorted(stood.metrics) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(process["errors"] == {} for process in stood.processes)
