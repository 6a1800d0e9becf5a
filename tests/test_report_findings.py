"""What is planted in a run is found, named, and the first of the findings; nothing else is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_runs import BASE_NS, PLANTS, START_NS, Script, capture, generation, training, write
from test_report_figures import span, step, timeline
from traces import Event, kineto, load, save

from autoprof import listing
from autoprof.report import (
    build,
    capture_rules,
    charts,
    comparison,
    findings,
    html,
    overview,
    rules,
    step_charts,
    step_rules,
)
from autoprof.report.figures import Finding, RunFigures
from autoprof.report.findings import KINDS

STEP = 7
# Of each cause: the finding's kind, what its text and its evidence name, and the file it is seen in.
NAMED = {
    "slow_tool": ("slow_tool", ["1 of 64 samples", "tool python took 15.0 s", "prompt 9, rollout 2"], "n2-401"),
    "long_answer": ("sample_tail", ["1 of 64 samples", "prompt 9, rollout 2", "turn"], "n2-401"),
    "slow_sample_reward": ("slow_reward", ["1 of 64 samples", "the reward took 16.0 s", "prompt 9"], "n2-401"),
    "slow_replica": ("slow_replica", ["rollout replica 2", "generate"], "n2-302"),
    "slow_rank": ("slow_rank", ["actor rank 5", "update_actor"], "n2-205"),
    "long_weight_sync": ("weight_sync", ["weight sync took 17.", "usually 2.0", "update_weights"], "n1-100"),
    "slow_step": ("slow_step", ["usually 37.", "more in update_actor"], "n1-100"),
    "gap": ("idle_gap", ["between generation and training", "compute_log_prob of actor rank"], "n1-100"),
    "slow_reward": ("slow_reward", ["the driver waited 1", "for rewards"], "n1-100"),
    "checkpoint": ("checkpoint", ["more in save_checkpoint"], "n1-100"),
    "validation": ("validation", ["more in testing"], "n1-100"),
}


def found(folder: Path, step: int | None = None, **more: int) -> RunFigures:
    write(folder, **more)
    return build.figures(listing.read(folder), None if step is None else [step])


def test_every_cause_that_can_be_planted_is_looked_for() -> None:
    assert set(NAMED) == set(PLANTS)


@pytest.mark.parametrize("seed", [1, 7])
@pytest.mark.parametrize("cause", PLANTS)
def test_what_is_planted_is_found_and_nothing_else(tmp_path: Path, cause: str, seed: int) -> None:
    figures = found(tmp_path / "run", seed=seed, **{cause: STEP})
    kind, words, file = NAMED[cause]
    assert [finding.kind for finding in figures.findings] == [kind]
    first = figures.findings[0]
    said = "\n".join([first.text, *first.evidence])
    assert [word for word in words if word not in said] == []
    assert first.file == f"timeline/{file}.jsonl"
    assert first.step == STEP
    # What it costs is what the step took longer, but for what varies anyway.
    row = next(row for row in figures.steps if row.number == STEP)
    assert first.seconds == pytest.approx(row.seconds - row.usual_s, abs=3.5)
    assert [row.number for row in figures.steps if row.slow] == [STEP]
    assert STEP in [step.number for step in figures.details]
    assert [step.findings for step in figures.details if step.number == STEP] == [figures.findings]


@pytest.mark.parametrize("seed", range(2))
def test_a_healthy_run_has_no_findings(tmp_path: Path, seed: int) -> None:
    write(tmp_path / "run", seed=seed)
    figures = build.figures(listing.read(tmp_path / "run"), list(range(1, 13)))
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
    figures = build.figures(listing.read(timeline(tmp_path / "run", n1=[*spans, *steps])))
    assert [finding.kind for finding in figures.findings] == ["slow_step"] * 3
    assert all(finding.evidence[-1].startswith("also in 2 other steps: ") for finding in figures.findings)
    assert [len(step.findings) for step in figures.details] == [1] * 4


def test_two_causes_in_one_step_are_both_found(tmp_path: Path) -> None:
    figures = found(tmp_path / "run", slow_rank=6, slow_tool=6)
    assert {finding.kind for finding in figures.findings} == {"slow_rank", "slow_tool"}


def captured(tmp_path: Path, make: Callable[[tuple[float, float]], list[Event]], **more: str) -> list[Finding]:
    script: Script = write(tmp_path / "run", captured=None)
    when = script.stages[4, "update_actor"]
    who = {"role": "actor", "stage": "update_actor", "rank": 0}
    capture(tmp_path / "run", 4, "actor.update_actor.rank0", who, ("n1", 200), when, make(when), **more)
    return build.figures(listing.read(tmp_path / "run")).findings


def test_a_device_that_waits_for_the_cpu_is_found(tmp_path: Path) -> None:
    def slow_host(when: tuple[float, float]) -> list[Event]:
        events = training(when, busy=0.3)
        for event in events:
            if event.get("cat") == "cpu_op":
                event["dur"] *= 19
        return events

    (finding,) = captured(tmp_path, slow_host)
    assert finding.kind == "cpu_bound"
    assert "GPU 0 did nothing for" in finding.text
    assert "actor.update_actor rank 0" in finding.text
    assert finding.file == "global_step_000004/actor.update_actor.rank0.n1.pid200.pt.trace.json.gz"
    assert 12 * 0.4 <= finding.seconds <= 12


def test_communication_beside_which_nothing_is_computed_is_found(tmp_path: Path) -> None:
    (finding,) = captured(tmp_path, lambda when: training(when, busy=0.75, overlapped=0.0))
    assert finding.kind == "communication"
    assert any("ncclDevKernel_AllReduce" in line for line in finding.evidence)
    assert finding.seconds == pytest.approx(12 * 0.75 * 0.2, rel=0.05)


@pytest.mark.parametrize("on_device", [True, False], ids=["nccl", "gloo"])
def test_a_rank_that_others_wait_for_in_collectives_is_found(tmp_path: Path, on_device: bool) -> None:
    """The stage ends at the same time in all ranks: only what they did inside of it tells."""
    script: Script = write(tmp_path / "run", captured=None)
    begin, end = when = script.stages[4, "update_actor"]
    first, length = (START_NS - BASE_NS) / 1e3 + begin * 1e6, (end - begin) * 1e6
    for rank in range(4):
        waits = {2: 0.02}.get(rank, 0.55 + rank / 100)
        where: Event = {"ph": "X", "cat": "user_annotation", "name": "gloo:all_gather", "pid": 1, "tid": 1}
        if on_device:
            where |= {"cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL", "pid": 0, "tid": 20}
        events = [{"ph": "X", "cat": "cpu_op", "name": "step", "pid": 1, "tid": 1, "ts": first, "dur": length}]
        computes = {
            "ph": "X",
            "cat": "kernel",
            "name": "gemm",
            "pid": 0,
            "tid": 7,
            "ts": first,
            "dur": (0.9 - waits) * length,
        }
        events += [computes] if on_device else []
        # Two at a time, of which each second counts once.
        for part in range(2):
            at = first + (0.9 - waits) * length * (1 + part / 100)
            events.append(where | {"tid": part, "ts": at, "dur": waits * length})
        who = {"role": "actor", "stage": "update_actor", "rank": rank}
        capture(tmp_path / "run", 4, f"actor.update_actor.rank{rank}", who, ("n1", 200 + rank), when, events)
    figures = build.figures(listing.read(tmp_path / "run"))
    finding = figures.findings[0]
    assert [each.kind for each in figures.findings] == ["slow_rank"]
    assert "actor rank 2 was slow in update_actor" in finding.text
    assert finding.file == "global_step_000004/actor.update_actor.rank2.n1.pid202.pt.trace.json.gz"
    assert finding.seconds == pytest.approx(0.54 * (end - begin), rel=0.05)
    assert finding.evidence[0].startswith("actor rank 2: ")
    (step,) = [step for step in figures.details if step.number == 4]
    spent = {each.rank: each.collectives_s for each in step.captures}
    assert spent[0] == pytest.approx(0.55 * (end - begin), rel=0.05)


def test_a_capture_that_was_cut_off_is_found(tmp_path: Path) -> None:
    (finding,) = captured(tmp_path, training, state="truncated")
    assert (finding.kind, finding.seconds) == ("bad_capture", 0.0)
    assert "truncated" in finding.text


def test_a_full_device_is_found(tmp_path: Path) -> None:
    write(tmp_path / "run", captured=5)
    (path,) = (tmp_path / "run").glob("global_step_000005/actor.update_actor.*.gz")
    gigabyte = 1 << 30
    args = {"Device Type": 1, "Device Id": 0, "Total Allocated": 70 * gigabyte, "Total Reserved": 76 * gigabyte}
    event = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": 1.0, "args": args}
    content = kineto([*load(path)["traceEvents"], event], BASE_NS)
    total = b'"deviceProperties": [{"id": 0, "totalGlobalMem": %d}]' % (80 * gigabyte)
    save(path, content.replace(b'"deviceProperties": []', total))
    (finding,) = build.figures(listing.read(tmp_path / "run")).findings
    assert finding.kind == "memory"
    assert "95 % of the device's memory" in finding.text
    assert finding.file == f"global_step_000005/{path.name}"


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
    return build.figures(listing.read(run), [1]).findings


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
    found = build.figures(listing.read(tmp_path / "run")).findings
    assert [finding.kind for finding in found] == ["bad_capture"] * 3
    assert found[0].evidence[-1].startswith("also in 6 other captures: global_step_000004/actor.update_actor.rank3.")


def test_weight_sync_that_is_long_in_every_step_is_a_finding_of_the_run(tmp_path: Path) -> None:
    write(tmp_path / "run", captured=None, weight_sync_s=15.0)
    figures = build.figures(listing.read(tmp_path / "run"))
    (finding,) = figures.findings
    assert (finding.kind, finding.step) == ("weight_sync_share", None)
    assert finding.seconds == pytest.approx(15, rel=0.1)


def test_weight_sync_in_every_other_step_is_as_usual(tmp_path: Path) -> None:
    """Asynchronous trainers send weights every few steps: it is held against the steps that do so."""
    spans = []
    for number in range(1, 21):
        at = 100.0 * number
        took = 20 if number == 12 else 5
        if not number % 4:
            spans.append(span("timer", "update_weights", at + 80, at + 80 + took, step=number))
        spans.append(step(at + 100, number, at))
    figures = build.figures(listing.read(timeline(tmp_path / "run", n1=spans)))
    (finding,) = figures.findings
    assert (finding.kind, finding.step, finding.seconds) == ("weight_sync", 12, 15)
    assert "weight sync took 20.0 s, usually 5.00 s" in finding.text


def test_an_engine_that_waits_for_requests_does_not_wait_for_the_cpu(tmp_path: Path) -> None:
    def few_requests(when: tuple[float, float]) -> list[Event]:
        return [event | {"dur": event["dur"] / 4} if event["ph"] == "X" else event for event in generation(when)]

    (finding,) = captured(tmp_path, few_requests)
    assert finding.kind == "device_idle"
    assert "CPU" not in finding.text
    assert "waited for the host or for requests" in finding.evidence[2]


DOCUMENTATION = Path(__file__).parent.parent / "docs" / "report.md"


@pytest.mark.parametrize(
    ("values", "documented", "said"),
    [
        ((overview.SLOW_RATIO, overview.SLOW_S), (1.2, 1), "more than 1.2 times the median"),
        ((overview.AROUND, overview.FEWEST), (10, 3), "the ten steps before it and the ten after it"),
        ((rules.LEAST_S, rules.LEAST_SHARE), (1, 0.03), "less than a second, or of less than 3 % of the step"),
        ((step_rules.SYNC_RATIO, findings.SYNC_SHARE), (2, 0.15), "takes 15 % of all steps"),
        ((step_rules.REWARD_SHARE, step_rules.SAMPLE_REWARD_SHARE), (0.1, 0.25), "a tenth of the step; or samples"),
        ((step_rules.TOOL_SHARE, capture_rules.IDLE_SHARE), (0.3, 0.4), "three tenths of their time on tools"),
        ((capture_rules.BARE_SHARE, capture_rules.FULL_SHARE), (0.15, 0.92), "92 % of the device's memory"),
        ((comparison.FINDING_RATIO, comparison.FINDING_SHARE), (1.1, 0.03), "1.1 times as long and 3 % of the step"),
        ((charts.MOST_BARS, html.MOST_ROWS, step_charts.MOST_LANES), (300, 400, 96), "Of more than 300 steps a bar"),
    ],
)
def test_the_documentation_has_the_thresholds(
    values: tuple[float, ...], documented: tuple[float, ...], said: str
) -> None:
    """Whoever changes one changes what is said of it."""
    assert values == documented
    assert said in " ".join(DOCUMENTATION.read_text().split())


def test_the_documentation_has_every_kind() -> None:
    text = DOCUMENTATION.read_text()
    assert [kind for kind in KINDS if f"`{kind}`" not in text] == []


def costly(**cost: float) -> list[dict[str, Any]]:
    """A driver of eight steps of 10 s; step 5 is captured, which takes `start` and `stop` seconds more."""
    lines, at = [], 0.0
    for number in range(1, 9):
        start, stop = (cost.get("start", 0.0), cost.get("stop", 0.0)) if number == 5 else (0.0, 0.0)
        end = at + 10 + start + stop
        lines += [
            span("timer", "gen", at, at + 4, step=number),
            span("timer", "update_actor", at + 4, end, step=number),
            step(end, number, at, rank=0),
        ]
        if start:
            lines += [
                span("profiling", "profiler start", at + 4, at + 4 + start, step=5, role="actor", rank=0),
                span("profiling", "profiler stop", end - stop, end, step=5, role="actor", rank=0),
            ]
        at = end
    return lines


@pytest.mark.fault("a capture's profiler takes 4 s to start", "the report tells it as profiling", "nothing")
def test_what_a_capture_costs_is_no_finding(tmp_path: Path) -> None:
    run = timeline(tmp_path / "run", n1=costly(start=3.0, stop=1.0))
    figures = build.figures(listing.read(run), [5])
    assert figures.findings == []
    row = figures.steps[4]
    assert (row.slow, row.seconds, row.usual_s) == (False, 14, 10)
    assert row.stages == pytest.approx({"update_actor": 6, "gen": 4, "profiling": 4, "other": 0})
    against = comparison.compared(comparison.of_step(figures, 5, False), comparison.of_step(figures, 5, False))
    assert against.findings == []
    usual = build.figures(listing.read(run), [4, 5])
    against = comparison.compared(comparison.of_step(usual, 4, False), comparison.of_step(usual, 5, False))
    assert against.findings == []
    assert html.page(figures)


def test_the_real_cause_comes_without_what_the_capture_costs(tmp_path: Path) -> None:
    lines = costly(start=3.0, stop=1.0)
    for line in lines:
        if line["step"] == 5 and line["name"] in ("update_actor", "step"):
            start, end = line["at"]
            line["at"] = start, end + 5
        elif line["step"] > 5:
            line["at"] = tuple(moment + 5 for moment in line["at"])
    figures = build.figures(listing.read(timeline(tmp_path / "run", n1=lines)))
    (finding,) = figures.findings
    assert (finding.text, finding.seconds) == ("step 5 took 15.0 s, usually 10.0 s: 5.00 s more in update_actor", 5)
    assert "profiling took another 4.00 s" in finding.evidence


def test_a_rank_whose_profiler_starts_inside_of_a_stage_is_not_slow(tmp_path: Path) -> None:
    ranks = {
        f"n{rank}": [span("stage", "update_actor", 1, 9 if rank == 1 else 5, role="actor", rank=rank)]
        for rank in range(4)
    }
    ranks["n1"].append(span("profiling", "profiler start", 2, 6, role="actor", rank=1))
    figures = build.figures(listing.read(timeline(tmp_path / "run", d=[step(10)], **ranks)), [1])
    assert [finding.kind for finding in figures.findings] == []
