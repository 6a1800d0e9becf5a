"""Real run of verl with slow steps: the report names their causes, and conditions open windows for them."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from autoprof.base.units import seconds
from autoprof.report.model import Finding, RunFigures
from tests.support import truth
from tests.support.helpers import autoprof
from tests.support.verl_runs import VerlRun, metas

# Causes of planted.py: step -> part of the finding's text, and start of the path of its evidence.
SLOW_S, VERY_SLOW_S = 4.0, 30.0
CAUSES = {
    3: ("1 of 8 samples: tool search took 4.", "journal/"),
    5: ("weight sync took 4.", "journal/"),
    7: ("actor rank 1 was slow in update_actor", "global_step_000007/actor.update_actor.rank1."),
    9: ("rollout replica 1 was slow in generate", "journal/"),
    12: ("1 of 8 samples: the reward took 4.", "journal/"),
    22: ("1 of 8 samples: the reward took 3", "journal/"),
}
# Rows of the truth suite: name, kind and step of the finding, its words, and its planted seconds.
ROWS = {
    "tool": ("slow_tool", 3, ("1 of 8 samples", "tool search"), SLOW_S),
    "weight sync": ("weight_sync", 5, ("update_weights",), SLOW_S),
    "slow rank in a collective": ("slow_rank", 7, ("actor rank 1", "update_actor"), SLOW_S),
    "slow replica": ("slow_replica", 9, ("rollout replica 1", "generate"), SLOW_S),
    "reward": ("slow_reward", 12, ("1 of 8 samples", "the reward"), SLOW_S),
    "slow rank": ("slow_rank", 14, ("actor rank 1", "update_weights"), SLOW_S),
    "very slow reward": ("slow_reward", 22, ("1 of 8 samples", "the reward"), VERY_SLOW_S),
}
# Step with a very slow reward.
SLOW = 22


@pytest.fixture(scope="module")
def reported(planted: VerlRun) -> RunFigures:
    """Return the output of `autoprof report --json`."""
    return msgspec.json.decode(autoprof("report", "--json", cwd=planted.folder).stdout, type=RunFigures)


@pytest.mark.truth
@pytest.mark.parametrize("name", ROWS)
def test_each_planted_cause_is_the_first_finding_of_its_step(
    name: str, reported: RunFigures, record_property: truth.Record, request: pytest.FixtureRequest
) -> None:
    # `make test` runs other tests beside this run, so the cost varies.
    share = 0.1 if request.config.getoption("thorough") else 0.4
    kind, step, words, planted_s = ROWS[name]
    of_step = msgspec.structs.replace(reported, findings=[each for each in reported.findings if each.step == step])
    wrong = truth.finding_differences(of_step, kind, step, words, planted_s, share)
    reported_s = of_step.findings[0].seconds if of_step.findings else 0.0
    expected = f"{kind} of step {step}"
    truth.row(record_property, f"verl {name}", expected, wrong, planted_s=planted_s, reported_s=reported_s)


def test_the_evidence_of_each_planted_cause_is_a_file(reported: RunFigures) -> None:
    first: dict[int | None, Finding] = {}
    for finding in reported.findings:
        first.setdefault(finding.step, finding)
    for step, (text, file) in CAUSES.items():
        assert text in first[step].text
        assert (first[step].file or "").startswith(file)


def test_the_findings_name_the_rank_replica_and_sample(reported: RunFigures) -> None:
    lines = {(finding.step, finding.kind): [finding.text, *finding.evidence] for finding in reported.findings}
    assert re.search(r"for 1 of 8 samples: .* in prompt \d+, rollout [01]", lines[3, "slow_tool"][0])
    assert any(
        re.fullmatch(r"tool search: 8 calls, .* longest 4\.\d+ s in prompt .*", line) for line in lines[3, "slow_tool"]
    )
    assert any(re.fullmatch(r"update_weights: 4\.\d+ s, usually .*", line) for line in lines[5, "weight_sync"])
    assert re.search(r": 4\.\d+ s outside of collectives, the others .* they waited for it", lines[7, "slow_rank"][0])
    assert re.fullmatch(r"actor rank 0: 4\.\d+ s of 4\.\d+ s in collectives", lines[7, "slow_rank"][2])
    assert any(re.fullmatch(r"rollout replica 1: \d\.\d+ s in \d+ calls", line) for line in lines[9, "slow_replica"])
    # Only one rank is slow. This shows without a capture, because the other rank's stage ends earlier.
    assert "actor rank 1 was slow in update_weights" in lines[14, "slow_rank"][0]
    # The slow rank explains the long weight sync.
    assert (14, "weight_sync") not in lines


def test_healthy_steps_have_no_such_findings(reported: RunFigures) -> None:
    """Findings of up to half the planted delay are allowed, since the machine may be busy."""
    # In step 1, verl needs some time before the first stage.
    (start,) = (finding for finding in reported.findings if finding.kind == "no_stage" and finding.step == 1)
    assert start.text.startswith("step 1 (warm-up): no stage ran for ")
    costly = {finding.step for finding in reported.findings if finding.seconds > SLOW_S / 2 and finding is not start}
    assert costly == set(CAUSES) | {14}
    assert {row.number for row in reported.steps} == set(range(1, 25))


def test_a_slow_replica_and_a_slow_rank_each_open_a_window(planted: VerlRun) -> None:
    metas = [json.loads(path.read_text()) for path in planted.directory.glob("global_step_*/*.meta.json")]
    # A slow step opens the last window, which other tests examine.
    metas = [meta for meta in metas if meta["step"] < 17]
    assert {(meta["role"], meta["state"]) for meta in metas} == {("actor", "complete")}
    whys = {meta["step"]: meta["window"] for meta in metas}
    asked, by_replica, by_rank = sorted(whys)
    assert (asked, whys[asked]) == (7, "AUTOPROF_STEPS=7")
    # The driver learns of other processes' conditions in a thread, so the next step may have begun.
    assert by_replica in (10, 11)
    assert by_rank in (15, 16)
    times = r"[0-9.]+ times the median of the others, [0-9.]+ m?s"
    replica = rf"replica 1 took [0-9.]+ m?s a token in step 9, {times} \(replica>15x\)"
    rank = rf"actor rank 1 took 4\.[0-9]+ s for update_weights in step 14, {times} \(rank>8x\)"
    assert re.fullmatch(replica, whys[by_replica]), whys
    assert re.fullmatch(rank, whys[by_rank]), whys


def test_the_step_after_a_slow_step_is_captured_with_its_reason(planted: VerlRun) -> None:
    folders = sorted(path.name for path in planted.directory.glob("global_step_*"))
    # Other conditions open the windows of earlier steps.
    assert [name for name in folders if int(name[-6:]) >= 17] == [planted.step_folder(SLOW + 1).name]
    found = metas(planted, SLOW + 1)
    assert {meta["state"] for meta in found} == {"complete"}
    (why,) = {meta["window"] for meta in found}
    number = r"([0-9.]+)"
    said = rf"step {SLOW} took {number} s, {number} times the median of {number} (m?)s \(step>9x\)"
    figures = re.fullmatch(said, why)
    assert figures, why
    took, times, usual = map(float, figures.groups()[:3])
    start, end = planted.step_window(SLOW)
    assert abs(took - (end - start) / 1e9) < 0.1
    assert took > VERY_SLOW_S
    assert times == pytest.approx(took / usual * (1000 if figures[4] else 1), rel=0.1)


def test_the_slowest_ranks_are_captured_with_their_reason(planted: VerlRun) -> None:
    found = metas(planted, SLOW + 1)
    assert {meta["role"] for meta in found} == {"actor", "ref", "rollout", "trainer"}
    took = {}
    for role in ("actor", "ref", "rollout"):
        # One rank of each role is captured.
        (rank,) = {meta["rank"] for meta in found if meta["role"] == role}
        (why,) = {meta["slowest"] for meta in found if meta["role"] == role}
        what, unit = ("replica", "token") if role == "rollout" else ("rank", "step")
        said = re.match(
            rf"slowest:1: {what} {rank} ([0-9.]+ m?s) a {unit} in the last 5 steps that were compared; ", why
        )
        assert said, why
        took[role] = said[1]
    # Compare with the timeline of the same five steps. The figures of the last step may arrive too late to count.
    (rank,) = {meta["rank"] for meta in found if meta["role"] == "ref"}
    stages = [span for span in planted.spans if (span["role"], span["rank"], span["kind"]) == ("ref", rank, "stage")]
    by_step = {span["step"]: (span["end_ns"] - span["start_ns"]) / 1e9 for span in stages}
    means = [sum(by_step[number] for number in range(last - 4, last + 1)) / 5 for last in (SLOW - 1, SLOW)]
    assert took["ref"] in [seconds(mean) for mean in means]
