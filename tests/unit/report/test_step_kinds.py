"""Kinds of steps: regular steps give the figures of a run, and time without a stage is a finding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoprof.cli.report import show
from autoprof.report import comparison, findings, html, markdown
from autoprof.report.model import RunFigures
from tests.support.timelines import figures, span, step, timeline

OWN = "autoprof's own"
Spans = list[dict[str, Any]]


def worker(number: int, at: float, **cost: float) -> Spans:
    """Return the spans of the worker of a captured step: its profiler starts, and its trace is exported."""
    of = {"step": number, "role": "actor", "rank": 0}
    found = [span("profiling", "profiler start", at, at + cost.get("start", 1), **of)]
    return [*found, span("profiling", "export", at + 1, at + 1 + cost.get("export", 0.5), **of)]


def driver(number: int, at: float, took: float, tokens: int = 0, covered: float = 1.0) -> Spans:
    """Return a step of `took` seconds, `covered` of which are in two stages."""
    half = at + took * covered / 2
    counts = {"prompt_tokens": 1, "response_tokens": tokens}
    turn = span("turn", "generate", at, half, step=number, role="agent_loop", ids={"sample": "p"}, counts=counts)
    return [
        *([turn] if tokens else []),
        span("timer", "gen", at, half, step=number),
        span("timer", "update", half, at + took * covered, step=number),
        step(at + took, number, at, rank=0),
    ]


def run(folder: Path, *lengths: float, captured: tuple[int, ...] = (), **more: Any) -> Path:
    """Write a run whose steps take `lengths` seconds, with profiler spans in the captured ones."""
    spans: dict[str, Spans] = {"driver": [], "worker": []}
    at = 0.0
    for number, took in enumerate(lengths, 1):
        spans["driver"] += driver(number, at, took, **more)
        spans["worker"] += worker(number, at) if number in captured else []
        at += took
    return timeline(folder, **spans)


def kinds(found: RunFigures) -> dict[int, str]:
    return {row.number: row.kind for row in found.steps}


def test_steps_are_warm_up_captured_or_regular(tmp_path: Path) -> None:
    found = figures(run(tmp_path / "run", 20, 10, 10, 10, captured=(1, 3)))
    assert kinds(found) == {1: "warm-up", 2: "regular", 3: "captured", 4: "regular"}
    assert found.basis == "2 regular steps; 1 warm-up, 1 captured"


def test_a_step_with_files_of_a_capture_is_captured(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", 20, 10, 10)
    capture = folder / "global_step_000002" / "actor.update.rank0.h.pid1.meta.json"
    capture.parent.mkdir()
    capture.write_text(json.dumps({"step": 2, "state": "failed", "reason": "no room"}))
    found = figures(folder)
    assert kinds(found) == {1: "warm-up", 2: "captured", 3: "regular"}
    page = html.page(found)
    assert "· 1 capture<" in page


@pytest.mark.parametrize("others", [(), (2, 3, 7)], ids=["regular", "with exports only"])
@pytest.mark.parametrize("tool", ["none", "torch"])
def test_a_captured_slow_step_is_a_finding_if_nothing_was_recorded(
    tmp_path: Path, tool: str, others: tuple[int, ...]
) -> None:
    folder = run(tmp_path / "run", 9, 2, 2, 2, 6, 2, 2, 2, 2, captured=others)
    began = figures(folder).steps[4].start_ns
    clock = {side: {"unix_ns": began + at, "monotonic_ns": at} for side, at in (("start", 1), ("stop", 6 * 10**9))}
    who = {"role": "actor", "stage": "update", "rank": 0, "host": "h", "pid": 1}
    meta = {"step": 5, "state": "complete", "tool": tool, "reason": "no torch in this process", "clock": clock} | who
    capture = folder / "global_step_000005" / "actor.update.rank0.h.pid1.meta.json"
    capture.parent.mkdir()
    capture.write_text(json.dumps(meta))
    found = figures(folder)
    assert (found.steps[4].captured, found.steps[4].kind) == (True, "regular" if tool == "none" else "captured")
    # The recording may be the cause if a profiler recorded the step.
    assert [finding.kind for finding in found.findings] == (["slow_step"] if tool == "none" else [])


@pytest.mark.parametrize(("end", "kind"), [(20.05, "regular"), (23, "writing traces")])
def test_an_export_that_ends_in_the_next_step_delays_it(tmp_path: Path, end: float, kind: str) -> None:
    of = {"step": 2, "role": "actor", "rank": 0}
    exporter = [span("profiling", "profiler stop", 18, 19, **of), span("profiling", "export", 19, end, **of)]
    steps = [line for number in (1, 2, 3, 4) for line in driver(number, 10.0 * number - 10, 10)]
    found = figures(timeline(tmp_path / "run", n1=steps, n2=exporter))
    assert kinds(found) == {1: "warm-up", 2: "captured", 3: kind, 4: "regular"}
    assert found.steps[2].stages[OWN] == pytest.approx(end - 20)


def test_an_export_counts_unless_another_process_works_meanwhile(tmp_path: Path) -> None:
    """torch's export holds the interpreter's lock. A worker exports from 10 s on, and runs `update` from 13 s on."""
    of = {"step": 2, "role": "actor"}
    first = [span("stage", "sync", 18, 20, rank=0, **of), span("stage", "reward", 11, 12, rank=0, **of)]
    exporter = [span("profiling", name, at, at + 4, rank=1, **of) for name, at in (("export", 10), ("hand-over", 14))]
    exporter += [span("stage", "update", 13, 16, rank=1, **of)]
    first += [step(10, rank=0), step(20, 2, 10, rank=0), step(30, 3, 20, rank=0)]
    found = figures(timeline(tmp_path / "run", n1=first, n2=exporter))
    # `reward` began after the export, so the driver does not wait. In `update`, the worker stands still.
    assert found.steps[1].stages == pytest.approx({"update": 2, "sync": 2, "reward": 1, "other": 2, OWN: 3})


def test_an_export_delays_the_step_of_its_own_process(tmp_path: Path) -> None:
    """Rank 0 exports while rank 1 begins the next step."""
    of = {"step": 2, "role": "trainer"}
    first = [step(10, rank=0), span("stage", "update", 10, 16, rank=0, **of), step(20, 2, 10, rank=0)]
    first += [span("profiling", "export", 16, 20, rank=0, **of), step(30, 3, 20, rank=0)]
    second = [span("stage", "update", 17, 30, step=3, rank=1), step(30, 3, 17, rank=1)]
    found = figures(timeline(tmp_path / "run", n1=first, n2=second))
    assert found.steps[1].stages == pytest.approx({"update": 6, "other": 0, OWN: 4})
    assert [each for each in found.findings if each.step == 2] == []


def test_the_first_step_of_each_start_of_the_trainer_is_a_warm_up(tmp_path: Path) -> None:
    first = [line for number in (1, 2, 3) for line in driver(number, 10.0 * number, 10)]
    # Step 3 runs again. The second start was killed in step 5, whose number the third one takes again.
    again = [line for number in (3, 4) for line in driver(number, 100 + 10.0 * number, 10)]
    last = [line for number in (5, 6) for line in driver(number, 200 + 10.0 * number, 10)]
    found = figures(timeline(tmp_path / "run", n1=first, n2=again, n3=last))
    assert [number for number, kind in kinds(found).items() if kind == "warm-up"] == [1, 3, 5]
    assert found.basis == "3 regular steps; 3 warm-up"


@pytest.mark.parametrize(("number", "kind"), [(3, "warm-up"), (4, "regular")])
def test_a_step_without_an_end_has_a_kind(tmp_path: Path, number: int, kind: str) -> None:
    first = [line for step_number in (1, 2) for line in driver(step_number, 10.0 * step_number, 10)]
    again = [line for step_number in range(3, number) for line in driver(step_number, 70 + 10.0 * step_number, 10)]
    again.append(span("timer", "gen", 120, 125, step=number))
    run = timeline(tmp_path / "run", n1=first, n2=[span("process", "", 99, 99), *again])
    assert [details.kind for details in figures(run, number).details] == [kind]


def test_the_figures_of_a_run_are_those_of_its_regular_steps(tmp_path: Path) -> None:
    found = figures(run(tmp_path / "run", 28, 4, 2, 6, captured=(2, 4), tokens=400))
    assert found.basis == "1 regular step; 1 warm-up, 2 captured"
    assert (found.median_s, found.tokens_per_s) == (2, 200)
    shown = [(stage.name, stage.seconds, stage.share, stage.steps) for stage in found.stages]
    assert shown == [("gen", 1, 0.5, 1), ("update", 1, 0.5, 1), ("other", 0, 0, 0), (OWN, 3, None, 2)]
    assert [(kind.name, kind.share) for kind in found.kinds] == [("generate", 0.5)]


@pytest.mark.parametrize(
    ("lengths", "captured", "median_s", "basis"),
    [
        ((28, 4, 6), (2, 3), 2.5, "2 captured steps, because no step is regular; 1 warm-up"),
        ((28,), (1,), 26.5, "1 warm-up step, because no step is regular"),
        ((28,), (), 28, "1 warm-up step, because no step is regular"),
        ((28, 4), (), 4, "1 regular step; 1 warm-up"),
    ],
)
def test_without_a_regular_step_the_others_count_and_are_named(
    tmp_path: Path, lengths: tuple[float, ...], captured: tuple[int, ...], median_s: float, basis: str
) -> None:
    found = figures(run(tmp_path / "run", *lengths, captured=captured))
    assert (found.median_s, found.basis) == (median_s, basis)


def test_every_output_names_the_steps_and_has_autoprofs_own_time_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = figures(run(tmp_path / "run", 28, 4, 2, 6, captured=(2, 4)))
    show(found)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "run: 2.00 s a step (1 regular step; 1 warm-up, 2 captured); unfinished"
    table = [line.split() for line in printed[2 : printed.index("", 3)]]
    assert [row[0] for row in table] == ["stage", "gen", "update", "other", "autoprof's"]
    assert table[-1] == ["autoprof's", "own", "3.00", "s", "-", "1.50", "s"]
    text = markdown.text(found)
    assert "2.00 s a step (1 regular step; 1 warm-up, 2 captured)." in text
    assert f"| {OWN} |  | 3.00 s | - | 1.50 s |" in text
    page = html.page(found)
    assert "1 regular step; 1 warm-up, 2 captured" in page
    for number, kind in kinds(found).items():
        row = page[page.index(f'<tr><td class="number" data-value="{number}">{number}</td>') :]
        assert f"<td>{kind}</td>" in row[: row.index("</tr>")]


def test_a_step_in_detail_has_its_kind_and_shares_of_100_percent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = figures(run(tmp_path / "run", 28, 4, 2, 6, captured=(2, 4)), 2)
    show(found, 2)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "run, step 2 (captured): 4.00 s"
    assert [line.split()[3:5] for line in printed[3:6]] == [["80", "%"], ["20", "%"], ["0", "%"]]
    assert printed[6].split() == ["autoprof's", "own", "1.50", "s", "-", "1.50", "s"]


def test_stages_that_no_regular_step_has_are_drawn(tmp_path: Path) -> None:
    steps = [line for number in (1, 2, 3) for line in driver(number, 10.0 * number, 10, covered=0.8)]
    steps.append(span("timer", "save_checkpoint", 28, 30, step=2))
    found = figures(timeline(tmp_path / "run", n1=steps, n2=worker(2, 20)))
    assert "save_checkpoint" not in [stage.name for stage in found.stages]
    assert "\nsave_checkpoint: 2.00 s\n" in html.page(found)


def test_the_median_of_slow_steps_is_that_of_regular_ones(tmp_path: Path) -> None:
    found = figures(run(tmp_path / "run", 50, 10, 14, 14, 14, 10, 15, 10, captured=(3, 4, 5)))
    assert [(row.number, row.usual_s) for row in found.steps if row.slow and row.kind == "regular"] == [(7, 10)]


def test_too_few_regular_steps_have_no_slow_one_and_that_is_reported(tmp_path: Path) -> None:
    found = figures(run(tmp_path / "run", 50, 10, 11, 11, 11, 10, 15, captured=(3, 4, 5)))
    assert [row.number for row in found.steps if row.slow] == []
    assert found.verdict == "No findings. Slow-step detection needs 4 regular steps; this run has 3."


def test_a_step_that_raised_is_in_the_verdict(tmp_path: Path) -> None:
    rows = figures(run(tmp_path / "run", 50, 10)).steps
    rows[1] = msgspec.structs.replace(rows[1], error="ValueError")
    assert findings.verdict(rows, has_unread_files=True).startswith(
        "Step 2 ended with ValueError. No other findings, but some data could not be read; see the notes."
    )


def test_runs_are_compared_by_their_regular_steps(tmp_path: Path) -> None:
    a = figures(run(tmp_path / "a", 28, 4, 2, 6, captured=(2, 4)))
    b = figures(run(tmp_path / "b", 90, 90, 2, 90, captured=(2, 4)))
    found = comparison.compare(comparison.side(a, None, True), comparison.side(b, None, True))
    assert found.findings == []
    assert {row.name: (row.a, row.b) for row in found.rows if row.unit == "s"}["step"] == (2, 2)
    assert found.basis == [f"{name}: 1 regular step; 1 warm-up, 2 captured" for name in ("b", "a")]
    both = msgspec.structs.replace(b, comparison=found)
    assert all(line in markdown.text(both) and line in html.page(both) for line in found.basis)


def no_stage(tmp_path: Path, **processes: Spans) -> list[str]:
    found = figures(timeline(tmp_path / "run", **processes))
    return [finding.text for finding in found.findings if finding.kind == "no_stage"]


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([("gen", 6, 8), ("update", 8, 10)], "no stage ran for 6.00 s, 60 % of the step, before gen"),
        ([("gen", 0, 4), ("update", 7, 10)], "no stage ran for 3.00 s, 30 % of the step, between gen and update"),
        ([("gen", 0, 4), ("update", 4, 7)], "no stage ran for 3.00 s, 30 % of the step, after update"),
        (
            [("gen", 2, 4), ("adv", 5, 6), ("update", 6, 9)],
            "no stage ran for 4.00 s, 40 % of the step: 2.00 s of it before gen",
        ),
        # An outer timer ends last.
        (
            [("gen", 0, 4), ("reward", 2, 3), ("update", 7, 10)],
            "no stage ran for 3.00 s, 30 % of the step, between gen",
        ),
    ],
)
def test_a_step_in_which_no_stage_runs_for_over_a_fifth_is_found(
    tmp_path: Path, stages: list[tuple[str, float, float]], said: str
) -> None:
    timers = [span("timer", name, at + 10, end + 10, step=2) for name, at, end in stages]
    (text,) = no_stage(tmp_path, n1=[*driver(1, 0, 10), *timers, step(20, 2, 10, rank=0)])
    assert text.startswith(f"step 2: {said}")


def test_stages_of_workers_count_and_a_fifth_is_not_found(tmp_path: Path) -> None:
    stage = span("stage", "update_actor", 12, 14, step=2, role="actor", rank=0)
    lines = [*driver(1, 0, 10), span("timer", "gen", 10, 12, step=2), step(14.9, 2, 10, rank=0)]
    assert no_stage(tmp_path, n1=lines, n2=[stage]) == []


@pytest.mark.parametrize(
    ("length", "parts", "count"),
    [(10, [1.0], 1), (10, [0.9], 0), (10, [0.9, 0.9], 0), (100, [2.9], 0), (100, [3.0], 1), (100, [2.0, 2.0], 0)],
)
def test_a_long_time_without_a_stage_is_found_although_it_is_under_a_fifth(
    tmp_path: Path, length: float, parts: list[float], count: int
) -> None:
    lines, at = [*driver(1, 0, 10)], 10.0
    for idle in parts:
        end = at + length / len(parts)
        lines.append(span("timer", "gen", at, end - idle, step=2))
        at = end
    assert len(no_stage(tmp_path, n1=[*lines, step(at, 2, 10, rank=0)])) == count


@pytest.mark.parametrize(("unit", "captured", "count"), [(0.02, (), 0), (0.04, (), 1), (0.2, (2,), 0), (0.3, (2,), 1)])
def test_little_time_without_a_stage_counts_in_regular_steps_alone(
    tmp_path: Path, unit: float, captured: tuple[int, ...], count: int
) -> None:
    """Step 2 has 4 units without a stage."""
    lines = [*driver(1, 0, 10), *driver(2, 10, 10 * unit, covered=0.6), *driver(3, 10 + 10 * unit, 10)]
    start = span("profiling", "profiler start", 10, 10 + unit / 5, step=2, role="actor", rank=0)
    assert len(no_stage(tmp_path, n1=lines, n2=[start] if captured else [])) == count


def test_the_sentence_has_the_kind_of_a_step_that_is_not_regular(tmp_path: Path) -> None:
    first = [span("timer", "gen", 18, 28), step(28, rank=0)]
    (text,) = no_stage(tmp_path, n1=[*first, *driver(2, 28, 2), *driver(3, 30, 2)])
    assert text == "step 1 (warm-up): no stage ran for 18.0 s, 64 % of the step, before gen"
    (finding,) = figures(tmp_path / "run").findings
    assert html.sentence_without_step(finding).startswith("No stage ran for 18.0 s")
    assert html.sentence_after_step(finding).startswith(" (warm-up): no stage ran for")


def test_autoprofs_own_time_and_exports_are_no_time_without_a_stage(tmp_path: Path) -> None:
    steps = [*driver(1, 0, 10), *driver(2, 10, 10, covered=0.4), *driver(3, 20, 10)]
    of = {"step": 2, "role": "actor", "rank": 0}
    costs = [span("profiling", "profiler stop", 14, 16, **of), span("profiling", "export", 16, 20, **of)]
    assert no_stage(tmp_path, n1=steps, n2=costs) == []
    (row,) = (row for row in figures(tmp_path / "run").steps if row.number == 2)
    assert row.stages == pytest.approx({"gen": 2, "update": 2, "other": 0, OWN: 6})


def test_of_many_steps_without_a_stage_the_three_costliest_are_listed(tmp_path: Path) -> None:
    spans = [line for number in range(1, 9) for line in driver(number, 20.0 * number, 10 + number, covered=0.5)]
    found = [each for each in figures(timeline(tmp_path / "run", n1=spans)).findings if each.kind == "no_stage"]
    assert [finding.step for finding in found] == [8, 7, 6]
    assert found[0].evidence[-1] == "also in 5 other steps: 1, 2, 3, 4, 5"


def test_workers_that_wait_while_no_stage_runs_are_one_finding(tmp_path: Path) -> None:
    def waiting(number: int, at: float, idle: float) -> tuple[Spans, Spans]:
        end = at + 5 + idle
        timers = [("gen", at, at + 2), ("update", end - 3, end)]
        lines = [span("timer", name, start, stop, step=number) for name, start, stop in timers]
        stages = [
            span("stage", name, start, stop, step=number, role="actor", rank=0)
            for name, start, stop in (("log_prob", at, at + 2), ("update_actor", end - 3, end))
        ]
        return [*lines, step(end, number, at, rank=0)], stages

    parts = [waiting(1, 0, 0), waiting(2, 5, 4), waiting(3, 14, 0)]
    trainer, actor = ([line for part in parts for line in part[place]] for place in (0, 1))
    found = figures(timeline(tmp_path / "run", n1=trainer, n2=actor), 2)
    assert [finding.kind for finding in found.findings] == ["no_stage"]
    assert [gap.end_s - gap.start_s for gap in found.details[0].gaps] == [4]


def test_steps_without_any_stage_are_a_note(tmp_path: Path) -> None:
    found = figures(timeline(tmp_path / "run", n1=[*driver(1, 0, 10), step(20, 2, 10, rank=0), *driver(3, 20, 10)]))
    assert found.findings == []
    assert "no stage was recorded in 1 step: 2" in found.notes


@pytest.mark.parametrize(("grown", "expected"), [("update", ["no_stage", "slow_step"]), ("other", ["no_stage"])])
def test_time_without_a_stage_explains_a_slow_step_only_if_it_grew(
    tmp_path: Path, grown: str, expected: list[str]
) -> None:
    """Each step has 4 s without a stage and 6 s with one; step 4 has 5 s more of one of the two."""
    lines, at = [], 0.0
    for number in range(1, 9):
        more = 5.0 if number == 4 else 0.0
        idle = 4 + more * (grown == "other")
        end = at + 10 + more
        lines += [span("timer", "update", at + idle, end, step=number), step(end, number, at, rank=0)]
        at = end
    found = figures(timeline(tmp_path / "run", n1=lines), 4)
    here = [finding for finding in found.details[0].findings if finding.step == 4]
    assert sorted(finding.kind for finding in here) == expected
    gap = next(finding for finding in here if finding.kind == "no_stage")
    assert "usually 4.00 s" in gap.evidence


def validated(folder: Path, *validations: float, steps: int = 13) -> RunFigures:
    """Return a run of 10 s a step, whose last steps validate for `validations` seconds more."""
    spans, at = [*driver(1, 0, 20)], 20.0
    for number in range(2, steps + 1):
        index = number - steps + len(validations) - 1
        took = validations[index] if index >= 0 else 0.0
        spans += [span("timer", "gen", at, at + 10, step=number), step(at + 10 + took, number, at, rank=0)]
        spans += [span("timer", "testing", at + 10, at + 10 + took, step=number)] if took else []
        at += 10 + took
    return figures(timeline(folder, n1=spans))


def test_a_stage_is_compared_in_the_steps_that_have_it(tmp_path: Path) -> None:
    a, b = validated(tmp_path / "a", 2, 4, 6), validated(tmp_path / "b", 9, 9, 9, 9, 9, 9)
    found = comparison.compare(comparison.side(a, None, True), comparison.side(b, None, True))
    (row,) = [row for row in found.rows if row.name == "testing"]
    assert (row.a, row.b, row.where) == (4, 9, "3 of 12 steps | 6 of 12 steps")
    texts = {finding.text: finding.seconds for finding in found.findings}
    # Half of the steps of `b` validate.
    assert texts["testing takes 9.00 s in b, 4.00 s in a (6 of 12 steps | 3 of 12 steps)"] == 2.5


def test_a_stage_that_few_steps_have_costs_little(tmp_path: Path) -> None:
    a, b = validated(tmp_path / "a", 2), validated(tmp_path / "b", 4)
    found = comparison.compare(comparison.side(a, None, True), comparison.side(b, None, True))
    assert [row.where for row in found.rows if row.name == "testing"] == ["1 of 12 steps"]
    assert found.findings == []


def stages_of(folder: Path, driver: Spans, worker: Spans) -> tuple[list[dict[str, float]], list[str]]:
    """Return the seconds of the stages of each step, rounded, and the texts of the findings."""
    driver = [span("stage", "train", at + 4, at + 10, step=step, role="actor", rank=0) for step, at in STEPS] + driver
    driver += [step(at + 10, number, at, rank=0) for number, at in STEPS]
    found = figures(timeline(folder, driver=driver, worker=worker))
    stages = [{name: round(took) for name, took in row.stages.items() if name != OWN} for row in found.steps]
    return stages, [each.text for each in found.findings]


STEPS = [(1, 0), (2, 10), (3, 20)]


def test_stages_of_a_process_without_steps_count(tmp_path: Path) -> None:
    worker = [span("stage", "generate", at, at + 4, step=None, role="rollout", rank=0) for _, at in STEPS]
    assert stages_of(tmp_path / "run", [], worker) == ([{"train": 6, "generate": 4, "other": 0}] * 3, [])
    (shown,) = figures(tmp_path / "run", 2).details
    assert [(part.stage, part.held_by) for part in shown.path] == [
        ("other", "generate of rollout rank 0"),
        ("train", None),
    ]


def test_a_thread_that_works_across_steps_counts_where_the_driver_has_no_stage(tmp_path: Path) -> None:
    ahead = [
        span("stage", "generate", begin, begin + 9, step=step, role="rollout", rank=0, beside=True)
        for step, begin in [(None, -5), (1, 4.1), (2, 15)]
    ]
    expected = [{"train": 6, "generate": 4, "other": 0}, {"train": 6, "generate": 4 - 1, "other": 1}]
    stages, findings = stages_of(tmp_path / "run", ahead, [])
    assert stages == [expected[0], expected[1], expected[0]]
    assert not findings


@pytest.mark.parametrize("kind", ["turn", "request", "sample", "stage"])
def test_tokens_are_counted_once(tmp_path: Path, kind: str) -> None:
    kinds = ["turn", "request", "sample", "stage"]
    spans = [
        span(each, "generate", at, at + 4, step=step, role="rollout", rank=0, counts={"response_tokens": tokens})
        | ({"stage_kind": "generate"} if each == "stage" else {})
        for step, at in STEPS
        for each, tokens in zip(kinds, (100, 200, 300, 400), strict=True)
        if kinds.index(each) >= kinds.index(kind)
    ]
    spans += [span("stage", "train", 5, 6, role="actor", rank=0, counts={"response_tokens": 7})]
    found = figures(timeline(tmp_path / "run", driver=[step(at + 10, each, at, rank=0) for each, at in STEPS] + spans))
    assert found.tokens_per_s == pytest.approx(10 * (kinds.index(kind) + 1))


def test_a_slow_step_without_stages_is_not_to_be_captured(tmp_path: Path) -> None:
    ends = [(1, 0, 2), (2, 2, 4), (3, 4, 6), (4, 6, 8), (5, 8, 20), (6, 20, 22)]
    run = timeline(tmp_path / "run", driver=[step(end, number, begin, rank=0) for number, begin, end in ends])
    (found,) = figures(run).findings
    assert (found.kind, found.step, found.seconds) == ("no_stage", 5, 10)
    assert found.text == "step 5 took 12.0 s, usually 2.00 s: 10.0 s more outside of all stages"


def test_a_slow_rank_explains_a_wait_outside_of_stages(tmp_path: Path) -> None:
    ranks: dict[str, Spans] = {"first": [], "second": []}
    for number in range(1, 7):
        at, slow_s = 10.0 * number, 6 * (number == 5)
        for rank, (spans, took) in enumerate(zip(ranks.values(), (1, 1 + slow_s), strict=True)):
            spans.append(span("stage", "reward", at, at + took, step=number, role="reward", rank=rank))
            spans.append(step(at + 2 + slow_s, number, at, rank=rank))
    assert [each.kind for each in figures(timeline(tmp_path / "run", **ranks)).findings][:1] == ["slow_rank"]


def test_a_step_whose_number_comes_again_is_named(tmp_path: Path) -> None:
    ends = [(1, 0, 2), (1, 2, 4), (2, 4, 6)]
    run = timeline(tmp_path / "run", driver=[step(end, number, begin, rank=0) for number, begin, end in ends])
    assert figures(run).notes == [
        "step 1 ran again; the last run is shown. If they were different steps, their numbers are wrong",
        "no stage was recorded in 2 steps: 1, 2",
        "no per-sample data: no `sample` hook fired",
    ]
