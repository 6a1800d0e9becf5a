"""A window that a slow step of a real run of verl opens by `AUTOPROF_WHEN`, for the ranks that were the slowest."""

from __future__ import annotations

import json
import re

from verl_runs import VerlRun

# The step whose reward is slow.
SLOW = 10


def test_the_step_after_the_slow_one_is_captured_and_says_why(slowed: VerlRun) -> None:
    assert [path.name for path in slowed.directory.glob("global_step_*")] == [slowed.step_folder(SLOW + 1).name]
    metas = [json.loads(path.read_text()) for path in slowed.step_folder(SLOW + 1).glob("*.meta.json")]
    assert {meta["state"] for meta in metas} == {"complete"}
    (why,) = {meta["window"] for meta in metas}
    figures = re.fullmatch(rf"step {SLOW} took ([0-9.]+) s, ([0-9.]+) times the median of ([0-9.]+) s \(step>2x\)", why)
    assert figures, why
    took, times, usual = map(float, figures.groups())
    start, end = slowed.step_window(SLOW)
    assert abs(took - (end - start) / 1e9) < 0.1
    assert took > 6
    assert abs(times - took / usual) < 0.2


def test_the_ranks_are_those_that_were_the_slowest_and_the_meta_files_say_why(slowed: VerlRun) -> None:
    metas = [json.loads(path.read_text()) for path in slowed.step_folder(SLOW + 1).glob("*.meta.json")]
    assert {meta["role"] for meta in metas} == {"actor", "ref", "rollout", "trainer"}
    for role in ("actor", "ref", "rollout"):
        # One rank of each role, by the times that the timeline has, too.
        (rank,) = {meta["rank"] for meta in metas if meta["role"] == role}
        (why,) = {meta["slowest"] for meta in metas if meta["role"] == role}
        what = "replica" if role == "rollout" else "rank"
        assert re.match(rf"slowest:1: {what} {rank} [0-9.]+ m?s a (step|token or a request) in the last 5 that", why), (
            why
        )
    took = dict.fromkeys((0, 1), 0.0)
    for span in slowed.spans:
        if (span["kind"], span["role"]) == ("stage", "ref") and span["step"] in range(SLOW - 4, SLOW + 1):
            took[span["rank"]] += (span["end_ns"] - span["start_ns"]) / 1e9
    (rank,) = {meta["rank"] for meta in metas if meta["role"] == "ref"}
    assert took[rank] == max(took.values())
