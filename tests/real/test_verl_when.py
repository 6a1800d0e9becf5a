"""Window that a slow step of a real run of verl opens through a condition, for the slowest ranks."""

from __future__ import annotations

import json
import re

import pytest

from autoprof.base.units import seconds
from tests.support.verl_runs import VerlRun

# Step with a very slow reward.
SLOW = 22


def test_the_step_after_a_slow_step_is_captured_with_its_reason(planted: VerlRun) -> None:
    folders = sorted(path.name for path in planted.directory.glob("global_step_*"))
    # Other conditions open the windows of earlier steps.
    assert [name for name in folders if int(name[-6:]) >= 17] == [planted.step_folder(SLOW + 1).name]
    metas = [json.loads(path.read_text()) for path in planted.step_folder(SLOW + 1).glob("*.meta.json")]
    assert {meta["state"] for meta in metas} == {"complete"}
    (why,) = {meta["window"] for meta in metas}
    number = r"([0-9.]+)"
    said = rf"step {SLOW} took {number} s, {number} times the median of {number} (m?)s \(step>9x\)"
    figures = re.fullmatch(said, why)
    assert figures, why
    took, times, usual = map(float, figures.groups()[:3])
    start, end = planted.step_window(SLOW)
    assert abs(took - (end - start) / 1e9) < 0.1
    assert took > 30
    assert times == pytest.approx(took / usual * (1000 if figures[4] else 1), rel=0.1)


def test_the_slowest_ranks_are_captured_with_their_reason(planted: VerlRun) -> None:
    metas = [json.loads(path.read_text()) for path in planted.step_folder(SLOW + 1).glob("*.meta.json")]
    assert {meta["role"] for meta in metas} == {"actor", "ref", "rollout", "trainer"}
    took = {}
    for role in ("actor", "ref", "rollout"):
        # One rank of each role is captured.
        (rank,) = {meta["rank"] for meta in metas if meta["role"] == role}
        (why,) = {meta["slowest"] for meta in metas if meta["role"] == role}
        what, unit = ("replica", "token") if role == "rollout" else ("rank", "step")
        said = re.match(
            rf"slowest:1: {what} {rank} ([0-9.]+ m?s) a {unit} in the last 5 steps that were compared; ", why
        )
        assert said, why
        took[role] = said[1]
    # Compare with the timeline of the same five steps. The figures of the last step may arrive too late to count.
    (rank,) = {meta["rank"] for meta in metas if meta["role"] == "ref"}
    stages = [span for span in planted.spans if (span["role"], span["rank"], span["kind"]) == ("ref", rank, "stage")]
    by_step = {span["step"]: (span["end_ns"] - span["start_ns"]) / 1e9 for span in stages}
    means = [sum(by_step[number] for number in range(last - 4, last + 1)) / 5 for last in (SLOW - 1, SLOW)]
    assert took["ref"] in [seconds(mean) for mean in means]
