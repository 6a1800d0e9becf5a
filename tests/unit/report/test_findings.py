"""Findings: a planted cause is named first, and nothing else is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoprof.report import build, charts, comparison, details, findings, html, lanes, overview, rules
from autoprof.report.model import Finding, RunFigures
from autoprof.rundir import runs
from tests.support.helpers import ROOT
from tests.support.report_runs import PLANTS, capture, write
from tests.support.timelines import span, step, timeline

STEP = 7
# By cause: the finding's kind, words of its text and evidence, and its file.
NAMED = {
    "slow_tool": ("slow_tool", ["1 of 64 samples", "tool python took 15.0 s", "prompt 9, rollout 2"], "n2-401"),
    "long_answer": ("sample_tail", ["1 of 64 samples", "prompt 9, rollout 2", "turn"], "n2-401"),
    "slow_sample_reward": ("slow_reward", ["1 of 64 samples", "the reward took 16.0 s", "prompt 9"], "n2-401"),
    "slow_replica": ("slow_replica", ["rollout replica 2", "generate"], "n2-302"),
    "slow_rank": ("slow_rank", ["actor rank 5", "update_actor"], "n2-205"),
    "long_weight_sync": ("weight_sync", ["weight sync took 17.", "usually 2.0", "update_weights"], "n1-100"),
    "slow_step": ("slow_step", ["usually 37.", "more in update_actor"], "n1-100"),
    "gap": ("no_stage", ["no stage ran for 9.20 s", "between gen and reward", "usually 300 ms"], "n1-100"),
    "slow_reward": ("slow_reward", ["the driver waited 1", "for rewards"], "n1-100"),
    "checkpoint": ("checkpoint", ["more in save_checkpoint"], "n1-100"),
    "validation": ("validation", ["more in testing"], "n1-100"),
}


def found(folder: Path, step: int | None = None, **more: int) -> RunFigures:
    write(folder, **more)
    return build.figures(runs.read(folder), () if step is None else (step,))


@pytest.mark.parametrize("seed", [1, 7])
@pytest.mark.parametrize("cause", PLANTS)
def test_what_is_planted_is_found_and_nothing_else(tmp_path: Path, cause: str, seed: int) -> None:
    figures = found(tmp_path / "run", seed=seed, **{cause: STEP})
    kind, words, file = NAMED[cause]
    assert [finding.kind for finding in figures.findings] == [kind]
    first = figures.findings[0]
    said = "\n".join([first.text, *first.evidence])
    assert [word for word in words if word not in said] == []
    assert first.file == f"journal/{file}.jsonl"
    assert first.step == STEP
    # The cost is the step's excess over the usual time, within the normal variation.
    row = next(row for row in figures.steps if row.number == STEP)
    assert first.seconds == pytest.approx(row.seconds - row.usual_s, abs=3.5)
    assert [row.number for row in figures.steps if row.slow] == [STEP]
    assert STEP in [step.number for step in figures.details]
    assert [step.findings for step in figures.details if step.number == STEP] == [figures.findings]


@pytest.mark.parametrize("seed", range(2))
def test_a_healthy_run_has_no_findings(tmp_path: Path, seed: int) -> None:
    write(tmp_path / "run", seed=seed)
    figures = build.figures(runs.read(tmp_path / "run"), list(range(1, 13)))
    assert figures.findings == []
    assert [step.findings for step in figures.details] == [[]] * 12
    assert figures.notes == []


def test_the_costliest_of_several_is_first(tmp_path: Path) -> None:
    figures = found(tmp_path / "run", slow_rank=3, long_weight_sync=5, slow_tool=9)
    assert [(finding.kind, finding.step) for finding in figures.findings] == [
        ("weight_sync", 5),
        ("slow_tool", 9),
        ("slow_rank", 3),
    ]


def test_what_held_up_slow_steps_that_are_not_shown_is_found_too(tmp_path: Path) -> None:
    """Six slow steps, of which four are shown."""
    places = zip(
        (3, 6, 9, 12, 15, 18), ("slow_rank", "long_weight_sync", *PLANTS[:2], "slow_replica", "gap"), strict=True
    )
    causes = {cause: number for number, cause in places}
    figures = found(tmp_path / "run", captured=None, steps=24, **causes)
    assert len(figures.details) == 4
    assert {finding.step: finding.kind for finding in figures.findings} == {
        step: NAMED[cause][0] for cause, step in causes.items()
    }


def test_of_steps_that_are_alike_the_costliest_are_told(tmp_path: Path) -> None:
    lengths = {number: 9.0 if number % 4 == 0 else 5.0 for number in range(1, 22)}
    spans = [span("timer", "gen", 10 * at, 10 * at + length, step=at) for at, length in lengths.items()]
    steps = [step(10 * at + length, at, 10 * at) for at, length in lengths.items()]
    figures = build.figures(runs.read(timeline(tmp_path / "run", n1=[*spans, *steps])))
    assert [finding.kind for finding in figures.findings] == ["slow_step"] * 3
    assert all(finding.evidence[-1].startswith("also in 2 other steps: ") for finding in figures.findings)
    assert [len(step.findings) for step in figures.details] == [1] * 4


@pytest.mark.parametrize(
    ("stage", "took", "found"),
    [
        (
            "update_actor",
            {0: 8.0, 1: 2.0, 2: 3.0},
            "actor rank 0 was slow in update_actor: 8.00 s, the others at most 3.00 s",
        ),
        ("load", {1: 8.0, 0: 2.0, 2: 3.0}, "actor rank 1 was slow in load: 8.00 s, the others at most 3.00 s"),
        ("update_actor", {0: 8.0, 1: 2.0, 2: 5.0}, ""),  # compilation may take twice as long in some ranks
        ("load", {0: 8.0, 1: 2.0, 2: 3.0}, ""),  # rank 0 may prepare the data
    ],
)
def test_only_a_much_slower_rank_is_found_in_a_warm_up(
    tmp_path: Path, stage: str, took: dict[int, float], found: str
) -> None:
    ranks = {f"n{rank}": [span("stage", stage, 0, end, role="actor", rank=rank)] for rank, end in took.items()}
    steps = [step(10), *(step(10 * number, number, 10 * number - 10) for number in range(2, 6))]
    gen = [span("stage", "gen", at, at + 10, step=at // 10 + 1) for at in range(0, 50, 10)]
    figures = build.figures(runs.read(timeline(tmp_path / "run", n9=[*gen, *steps], **ranks)))
    assert [finding.text for finding in figures.findings] == ([f"step 1 (warm-up): {found}"] if found else [])


def test_two_causes_in_one_step_are_both_found(tmp_path: Path) -> None:
    figures = found(tmp_path / "run", slow_rank=6, slow_tool=6)
    assert {finding.kind for finding in figures.findings} == {"slow_rank", "slow_tool"}


def samples(tmp_path: Path, **more: Any) -> list[Finding]:
    """A step of 20 s with ten samples of 10 s, of which a tool takes half and the reward a tenth."""
    spans = []
    for number in range(10):
        ids = {"role": "agent_loop", "ids": {"sample": str(number), "rollout": 0}}
        spans += [
            span("turn", "generate", 0, 4, **ids),
            span("tool", "search", 4, more.get("tool", 4.5), error="TimeoutError", **ids),
            span("reward", "compute_score", more.get("reward", 9), 10, **ids),
            span(
                "sample", "tool_agent", 0, 10, **ids, error="ValueError" if number in more.get("failed", ()) else None
            ),
        ]
    run = timeline(tmp_path / "run", n1=[span("timer", "gen", 0, 10), step(10)], n2=spans)
    return build.figures(runs.read(run), [1]).findings


def test_tools_that_take_much_of_all_samples_are_found(tmp_path: Path) -> None:
    (finding,) = samples(tmp_path, tool=9)
    assert (finding.kind, finding.seconds) == ("tool_time", 5)
    assert "50 % of their time on tools" in finding.text
    assert any(line.startswith("tool search: 10 calls") for line in finding.evidence)


def test_rewards_that_take_much_of_all_samples_are_found(tmp_path: Path) -> None:
    (finding,) = samples(tmp_path, reward=6)
    assert (finding.kind, finding.seconds) == ("slow_reward", 4)
    assert "40 % of their time on their reward" in finding.text


def test_samples_that_failed_are_found(tmp_path: Path) -> None:
    (finding,) = samples(tmp_path, failed=(2, 5))
    assert (finding.kind, finding.seconds) == ("failed_samples", 0)
    assert "2 of 10 samples ended with an exception" in finding.text
    assert [line.split(":")[0] for line in finding.evidence] == ["prompt 2, rollout 0", "prompt 5, rollout 0"]


def test_of_many_alike_the_costliest_are_told(tmp_path: Path) -> None:
    script = write(tmp_path / "run", captured=None)
    for rank in range(9):
        who = {"role": "actor", "stage": "update_actor", "rank": rank}
        when = script.stages[4, "update_actor"]
        capture(tmp_path / "run", 4, f"actor.update_actor.rank{rank}", who, ("n1", 200 + rank), when, [], "failed")
    found = build.figures(runs.read(tmp_path / "run")).findings
    assert [finding.kind for finding in found] == ["bad_capture"] * 3
    assert found[0].evidence[-1].startswith("also in 6 other captures: global_step_000004/actor.update_actor.rank3.")


def test_weight_sync_that_is_long_in_every_step_is_a_finding_of_the_run(tmp_path: Path) -> None:
    write(tmp_path / "run", captured=None, weight_sync_s=15.0)
    figures = build.figures(runs.read(tmp_path / "run"))
    (finding,) = figures.findings
    assert (finding.kind, finding.step) == ("weight_sync_share", None)
    assert finding.seconds == pytest.approx(15, rel=0.1)


def test_weight_sync_in_every_other_step_is_as_usual(tmp_path: Path) -> None:
    """Asynchronous trainers send weights every few steps: it is compared with steps that do the same."""
    spans = []
    for number in range(1, 21):
        at = 100.0 * number
        took = 20 if number == 12 else 5
        if not number % 4:
            spans.append(span("timer", "update_weights", at + 80, at + 80 + took, step=number))
        spans.append(span("timer", "gen", at, at + 80, step=number))
        spans.append(span("timer", "update", at + 80 + (0 if number % 4 else took), at + 100, step=number))
        spans.append(step(at + 100, number, at))
    figures = build.figures(runs.read(timeline(tmp_path / "run", n1=spans)))
    (finding,) = figures.findings
    assert (finding.kind, finding.step, finding.seconds) == ("weight_sync", 12, 15)
    assert "weight sync took 20.0 s, usually 5.00 s" in finding.text


def steps_of(tmp_path: Path, *took: float) -> list[Finding]:
    """Return the findings of a run whose steps take these seconds, each nearly all for the update."""
    spans, at = [], 100.0
    for number, seconds in enumerate(took, 1):
        spans += [span("timer", "update_actor", at, at + seconds - 0.1, step=number), step(at + seconds, number, at)]
        at += seconds
    return build.figures(runs.read(timeline(tmp_path / "run", n1=spans))).findings


def test_steps_that_take_longer_and_longer_are_a_finding_of_the_run(tmp_path: Path) -> None:
    # The first step is a warm-up.
    (finding,) = steps_of(tmp_path, 30, *range(20, 36))
    assert (finding.kind, finding.step, finding.seconds) == ("growth", None, 8)
    assert finding.text.endswith(
        "23.5 s in the first half of the run, 31.5 s in the second: 8.00 s more in update_actor"
    )


@pytest.mark.parametrize(
    "took",
    [
        (20, 21, 20, 22, 21, 20, 22, 21, 20, 21, 22, 20),
        (20, 20.5, 21, 21.5, 22, 22.5, 23, 23.5, 24, 24.5),
        (20, 21, 22, 23, 24, 25, 26, 27),
        (24, 23.5, 23, 22.5, 22, 21.5, 21, 20.5, 20, 19.5),
    ],
    ids=["noise", "under a fifth", "seven regular steps", "shorter and shorter"],
)
def test_steps_that_do_not_grow_much_are_no_finding(tmp_path: Path, took: tuple[float, ...]) -> None:
    assert steps_of(tmp_path, *took) == []


DOCUMENTATION = ROOT / "docs" / "findings.md"


@pytest.mark.parametrize(
    ("values", "documented", "said"),
    [
        ((overview.SLOW_RATIO, overview.SLOW_S), (1.2, 1), "more than 1.2 times the median"),
        ((overview.STEPS_AROUND, overview.MIN_STEPS), (10, 3), "the ten steps before and the ten after"),
        ((rules.LEAST_S, rules.LEAST_SHARE), (1, 0.03), "under a second, or under 3 % of the step"),
        ((rules.SYNC_RATIO, findings.SYNC_SHARE), (2, 0.15), "at least 15 % of the time of all regular steps"),
        (
            (rules.REWARD_SHARE, rules.SAMPLE_REWARD_SHARE),
            (0.1, 0.25),
            "a tenth of the step; samples spend a quarter",
        ),
        (
            (overview.NO_STAGE_SHARE, rules.NO_STAGE_S, rules.LEAST_S),
            (0.2, 0.1, 1),
            "for over a fifth of a step (0.1 s at least in a regular step, 1 s in others), or for 1 s and 3 % of it at",
        ),
        (
            (findings.GROWTH_RATIO, findings.MIN_GROWING),
            (1.2, 8),
            "is 1.2 times that of the first half, and of all pairs of steps most grow. This needs 8 steps",
        ),
        ((rules.TOOL_SHARE, rules.IDLE_SHARE), (0.3, 0.4), "three tenths of the samples' time"),
        ((rules.BARE_SHARE, rules.FULL_SHARE), (0.15, 0.92), "92 % of the device's memory"),
        ((comparison.FINDING_RATIO, comparison.FINDING_SHARE), (1.1, 0.03), "1.1 times as long and 3 % of the step"),
        ((charts.MAX_BARS, html.MAX_ROWS, lanes.MAX_LANES), (300, 400, 96), "with more than 300 steps, a bar"),
    ],
)
def test_the_documentation_has_the_thresholds(
    values: tuple[float, ...], documented: tuple[float, ...], said: str
) -> None:
    """A changed threshold must be changed in the documentation too."""
    assert values == documented
    assert said in " ".join(DOCUMENTATION.read_text().split())


def test_the_findings_of_a_run_are_the_same_on_each_page(tmp_path: Path) -> None:
    causes = {"slow_rank": 3, "long_weight_sync": 5, "slow_tool": 9, "gap": 11}
    write(tmp_path / "run", captured=5, **causes)
    run = runs.read(tmp_path / "run")
    whole = build.figures(run)
    assert {finding.step: finding.kind for finding in whole.findings} == {
        step: NAMED[cause][0] for cause, step in causes.items()
    }
    for number in range(1, 13):
        page = build.figures(run, [number])
        assert page.findings == whole.findings
        assert [shown.number for shown in page.details] == [number]
        if number in causes.values():
            assert page.details[0].findings == [finding for finding in whole.findings if finding.step == number]


def test_a_step_that_the_report_does_not_judge_is_judged_if_it_is_chosen(tmp_path: Path) -> None:
    """All steps wait for rank 1. The report judges one of them: it has the median time."""
    ranks: list[list[dict[str, Any]]] = [[], []]
    for number in range(1, 8):
        start = 10 * number
        for rank, length in enumerate((2, 6)):
            ids = {"role": "actor", "rank": rank, "step": number}
            ranks[rank].append(span("stage", "update_actor", start, start + length, **ids))
        ranks[0].append(step(start + 6 + number / 100, number, start))
    run = runs.read(timeline(tmp_path / "run", n1=ranks[0], n2=ranks[1]))
    whole = build.figures(run)
    assert [(finding.kind, finding.step) for finding in whole.findings] == [("slow_rank", 5), ("slow_rank", 1)]
    page = build.figures(run, [3])
    assert page.findings == whole.findings
    assert [(finding.kind, finding.step) for finding in page.details[0].findings] == [("slow_rank", 3)]


def test_the_typical_step_is_judged_if_only_captured_steps_are_shown(tmp_path: Path) -> None:
    write(tmp_path / "run", captured=2)
    rows = build.figures(runs.read(tmp_path / "run")).steps
    regular = sorted((row for row in rows if row.kind == overview.REGULAR), key=lambda row: row.seconds)
    assert details.more_to_judge(rows, [2]) == [1, regular[len(regular) // 2].number]
    assert details.more_to_judge(rows, [2, 7]) == [1]


def test_a_slow_rank_explains_a_long_weight_sync() -> None:
    of_step = {"step": 14}
    sync = Finding(
        kind="weight_sync", text="", evidence=["update_weights: 4.12 s, usually 82.2 ms"], seconds=4.03, **of_step
    )
    text = "step 14: actor rank 1 was slow in {}: 4.10 s, the others 80 ms in the median"
    for stage, kept in (("update_weights", ["slow_rank"]), ("update_actor", ["weight_sync", "slow_rank"])):
        rank = Finding(kind="slow_rank", text=text.format(stage), evidence=[], seconds=4.0, **of_step)
        assert [each.kind for each in findings.unexplained([sync, rank])] == kept
