"""Runs with several loops, and validations outside of steps."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoprof.cli import doctor, report, trigger
from autoprof.cli.main import main
from autoprof.report import build, html, markdown
from autoprof.report.model import RunFigures
from autoprof.rundir import layout, runs
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import OpenSpan, ProcessStacks, Why
from autoprof.traces import merge_step
from autoprof.traces import timeline as timeline_reader
from tests.support import helpers
from tests.support.helpers import process_lines
from tests.support.timelines import SECOND, START_NS, figures, span, step, timeline

Spans = list[dict[str, Any]]


def loop(number: int, at: float, *lengths: float, trainer: str = "", before_s: float | None = None) -> Spans:
    """Return the steps of a loop, one after the other from `at` on, each with a stage that is named after the loop."""
    ids: dict[str, Any] = {"trainer": trainer} if trainer else {}
    ids |= {"loop": number} if number > 1 else {}
    found = []
    for place, length in enumerate(lengths, 1):
        found += [span("stage", f"work {number}", at, at + length, step=place, rank=0)]
        first = {"before_s": before_s} if place == 1 and before_s is not None else {}
        found += [step(at + length, place, at, rank=0, ids={**ids, **first})]
        at += length
    return found


def two_loops(folder: Path) -> Path:
    first = loop(1, 0, 5, 2, 2, trainer="SFTTrainer")
    return timeline(folder / "run", driver=first + loop(2, 20, 9, 4, 4, trainer="GRPOTrainer", before_s=3.0))


def test_a_hang_and_a_death_belong_to_the_loop_of_their_time(tmp_path: Path) -> None:
    path = two_loops(tmp_path)
    for name, at in (("step_000002", 5), ("step_000002.loop2", 29)):
        begun_ns = START_NS + at * SECOND
        folder = path / "hangs" / name
        folder.mkdir(parents=True)
        why = Why(host="n1", pid=1, unix_ns=begun_ns + SECOND, step=2, since_ns=begun_ns, condition="hang>1s")
        (folder / "why.json").write_bytes(msgspec.json.encode(why))
        ids = {"loop": 2} if at > 20 else {}
        spans = [OpenSpan(kind="step", name="step", step=2, role="trainer", rank=0, start_ns=begun_ns, ids=ids)]
        stacks = ProcessStacks(host="n1", pid=1, unix_ns=begun_ns + SECOND, spans=spans)
        (folder / "n1-1.json").write_bytes(msgspec.json.encode(stacks))
    found = figures(path)
    texts = [[finding.text for finding in part.findings if finding.kind == "hang"] for part in found.loops]
    assert [[text.partition(":")[0] for text in each] for each in texts] == [
        ["step 2 was stuck for 2.00 s"],
        ["step 2 (loop 2) was stuck for 4.00 s"],
    ]


def shown(found: RunFigures, step: int | None = None) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        report.show(found, step)
    return text.getvalue()


def test_each_loop_has_a_headline_a_table_and_steps(tmp_path: Path) -> None:
    found = figures(two_loops(tmp_path))
    assert [(part.loop, part.trainer, part.median_s) for part in found.loops] == [
        (1, "SFTTrainer", 2),
        (2, "GRPOTrainer", 4),
    ]
    assert [[(row.number, row.seconds, row.kind) for row in part.steps] for part in found.loops] == [
        [(1, 5, "warm-up"), (2, 2, "regular"), (3, 2, "regular")],
        [(1, 9, "warm-up"), (2, 4, "regular"), (3, 4, "regular")],
    ]
    assert [[stage.name for stage in part.stages] for part in found.loops] == [["work 1", "other"], ["work 2", "other"]]
    assert [[detail.number for detail in part.details] for part in found.loops] == [[3], [3]]
    assert (found.steps, found.stages, found.details, found.median_s) == ([], [], [], None)
    assert not [note for part in found.loops for note in part.notes if "was started" in note]


def test_all_outputs_have_a_section_for_each_loop(tmp_path: Path) -> None:
    found = figures(two_loops(tmp_path))
    text = shown(found)
    assert "run, loop 1 (SFTTrainer): 2.00 s a step (2 regular steps; 1 warm-up)" in text
    assert "run, loop 2 (GRPOTrainer): 4.00 s a step (2 regular steps; 1 warm-up)" in text
    lines = markdown.text(found).splitlines()
    assert [line for line in lines if line.startswith("# ")] == [
        "# autoprof: run",
        "# Loop 1 (SFTTrainer)",
        "# Loop 2 (GRPOTrainer)",
    ]
    page = html.page(found)
    for each in ("loop1-step-3", "loop2-step-3", "loop1-run", "loop2-run"):
        assert page.count(f'id="{each}"') == 1
    assert page.count('data-chart="loop2-lanes-3"') == 1


def test_one_loop_is_shown_alone(tmp_path: Path) -> None:
    run = runs.read(two_loops(tmp_path))
    found = build.figures(run, loop=2)
    assert (found.loop, found.trainer, [row.seconds for row in found.steps]) == (2, "GRPOTrainer", [9, 4, 4])
    assert build.ReportRequest(run=run, loop=2, step=3).page.name == "report.loop2.step3.html"
    with pytest.raises(runs.NotFound, match=r"run has no loop 3; its loops: loop 1 \(SFTTrainer\), loop 2 \(GRPO"):
        build.figures(run, loop=3)


def test_a_comparison_names_the_loop_and_work_outside_of_stages(tmp_path: Path) -> None:
    other = runs.read(timeline(tmp_path / "other", driver=loop(1, 0, 3, 3, 3)))
    spans = [*loop(1, 0, 5, 2, 2), *loop(2, 20, 9), *(step(at + 9, at // 9, at, ids={"loop": 2}) for at in (29, 38))]
    run = runs.read(timeline(tmp_path / "run", driver=spans))
    found = build.report_figures(build.ReportRequest(run=run, loop=2, against=other))
    assert found.comparison is not None
    assert (found.comparison.b, found.comparison.a) == ("loop 2 of run", "other")
    (finding,) = [each for each in found.comparison.findings if each.kind == "no_stage"]
    assert finding.text == "work outside of all stages takes 9.00 s in loop 2 of run, 0 s in other"
    assert finding.remedy.startswith("Make this part of the loop faster")
    assert html.sentence_without_step(finding).startswith("Work outside of all stages")
    stage = msgspec.structs.replace(finding, kind="slower_stage", text="update_actor takes 9.00 s")
    assert html.sentence_without_step(stage) == "update_actor takes 9.00 s"


def test_a_copied_command_of_the_page_finds_the_run(tmp_path: Path) -> None:
    run = two_loops(tmp_path)
    assert f"<code>autoprof open {run} --step 3 --loop 2</code>" in html.page(figures(run))


def test_a_loop_that_does_not_exist_is_not_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["open", str(two_loops(tmp_path)), "--loop", "3", "--no-browser", "--port", "0"]) == 1
    assert "run has no loop 3; its loops: loop 1 (SFTTrainer), loop 2 (GRPOTrainer)" in capsys.readouterr().err


def test_captured_steps_of_several_loops_are_listed_with_the_loop(tmp_path: Path) -> None:
    folder = two_loops(tmp_path)
    for number in (1, 2):
        RunDir(folder).step(1, number).mkdir()
    with pytest.raises(runs.NotFound, match=r"run has several steps; choose with --step: 1, 1 \(loop 2\)$"):
        merge_step.chosen(runs.read(folder), None)


def test_doctor_names_the_loop_of_an_open_step(tmp_path: Path) -> None:
    run = timeline(tmp_path / "run", driver=[*loop(1, 0, 5, 2, 2), *loop(2, 20, 9)])
    began = {"kind": "begun", "span": "step", "name": "step", "step": 2, "role": "trainer", "rank": 0}
    began |= {"start_ns": START_NS + 29 * SECOND, "ids": {"loop": 2}}
    (journal,) = (run / "journal").iterdir()
    journal.write_text(process_lines() + journal.read_text() + json.dumps(began, separators=(",", ":")) + "\n")
    facts = doctor.examine_run(runs.read(run)).facts
    assert facts["steps executed"].startswith("1-3; loop 2: 1; step 2 (loop 2) ")


@pytest.mark.parametrize(("end", "said"), [("os._exit(3)", "vanished in work"), ("1 / 0", "ZeroDivisionError")])
def test_a_death_names_the_loop_of_its_step(tmp_path: Path, end: str, said: str) -> None:
    code = f"""
import autoprof, os
for loop in (1, 2):
    for number in (1, 2):
        with autoprof.step(number), autoprof.stage("work"):
            if (loop, number) == (2, 2):
                {end}
"""
    helpers.run([sys.executable, "-c", code], cwd=tmp_path, AUTOPROF="1", AUTOPROF_STEPS="", AUTOPROF_RUN_ID="made")
    (problem,) = doctor.examine_run(runs.read(tmp_path / "autoprof_runs" / "made")).problems
    assert said in problem
    assert "in work of step 2 (loop 2)" in problem


def test_a_step_of_several_loops_must_be_chosen(tmp_path: Path) -> None:
    run = runs.read(two_loops(tmp_path))
    asked = r"run has step 2 in loop 1 \(SFTTrainer\) and loop 2 \(GRPOTrainer\); choose with --loop"
    with pytest.raises(runs.NotFound, match=asked):
        build.figures(run, [2])
    with pytest.raises(runs.NotFound, match=asked):
        merge_step.chosen(run, 2)
    (details,) = build.figures(run, [2], loop=2).details
    assert (details.seconds, list(details.stages)) == (4, ["work 2", "other"])
    chosen = merge_step.chosen(run, 2, 2)
    assert (chosen.number, chosen.loop, Path(chosen.folder).name) == (2, 2, "global_step_000002.loop2")
    work = merge_step.plan_step_merge(run, chosen, merge_step.MergeOptions())
    assert [each.name for spans in work.timeline.values() for each in spans] == ["work 2", "step"]


def test_a_step_of_one_loop_needs_no_choice(tmp_path: Path) -> None:
    run = timeline(tmp_path / "run", driver=loop(1, 0, 5, 2, 2) + loop(2, 20, 9))
    (details,) = build.figures(runs.read(run), [3]).details
    assert details.stages["work 1"] == 2
    assert merge_step.chosen(runs.read(run), 3).loop == 1
    # Only one loop has both steps.
    assert [step.number for step in build.figures(runs.read(run), [3, 1]).details] == [3, 1]


def test_a_step_that_a_loop_lacks_is_reported_with_the_steps_of_this_loop(tmp_path: Path) -> None:
    folder = timeline(tmp_path / "run", driver=loop(1, 0, 5, 2, 2) + loop(2, 20, 9))
    for number in (1, 2):
        RunDir(folder).step(1, number).mkdir()
    with pytest.raises(runs.NotFound, match="no step 3 in loop 2; steps in its timeline: 1; captured steps: "):
        build.figures(runs.read(folder), [3], loop=2)
    with pytest.raises(runs.NotFound, match=r"^run has no step 9; its loops: loop 1, loop 2$"):
        build.figures(runs.read(folder), [1, 9])


@pytest.mark.parametrize("loops", [[1], [1, 2, 10]])
def test_a_trigger_sees_the_captures_of_the_last_loop(tmp_path: Path, loops: list[int]) -> None:
    run = two_loops(tmp_path)
    for number in loops:
        folder = RunDir(run).step(2, number)
        folder.mkdir()
        (folder / f"capture{number}.meta.json").write_text("{}")
    (view,) = trigger.OnDisk(runs.read(run)).look([2])
    assert list(view.steps[2].captures) == [f"capture{loops[-1]}"]


def test_comparing_loops_needs_a_choice(tmp_path: Path) -> None:
    run = runs.read(two_loops(tmp_path))
    other = runs.read(timeline(tmp_path / "other", driver=loop(1, 0, 9, 8, 8)))
    with pytest.raises(runs.NotFound, match=r"run has several loops: loop 1 .* choose with --loop"):
        build.report_figures(build.ReportRequest(run=run, against=other))
    for against, median_s in ((run, 4), (other, 8)):  # the other run has one loop
        found = build.report_figures(build.ReportRequest(run=run, against=against, loop=2)).comparison
        assert found is not None
        assert [(row.a, row.b) for row in found.rows if row.kind == "step"] == [(median_s, 4)]


def test_a_resumed_run_repeats_its_loops(tmp_path: Path) -> None:
    first = loop(1, 0, 5, 2) + loop(2, 20, 9)
    again = loop(1, 100, 6, 3) + loop(2, 120, 8, 4)
    found = figures(timeline(tmp_path / "run", first=first, again=again))
    assert [[row.seconds for row in part.steps] for part in found.loops] == [[6, 3], [8, 4]]
    note = "the run was started 2 times; for a step that ran again, its last run is shown"
    assert [note in part.notes for part in found.loops] == [True, True]


def programs(folder: Path, *commands: str, **info: Any) -> Path:
    """Write a run in which processes with these commands train one after the other."""
    drivers = {f"p{place}": loop(1, 100 * place, 5 + place, 2 + place) for place in range(len(commands))}
    run = timeline(folder / "run", **drivers)
    (run / "run.json").write_text(json.dumps({"id": "run", **info}))
    for command, path in zip(commands, sorted((run / "journal").iterdir()), strict=True):
        path.write_text(process_lines(process=command) + path.read_text())
    return run


def test_different_programs_of_a_run_are_loops(tmp_path: Path) -> None:
    found = figures(programs(tmp_path, "python sft.py", "python grpo.py"))
    assert [[row.seconds for row in part.steps] for part in found.loops] == [[5, 2], [6, 3]]
    run = runs.read(tmp_path / "run")
    chosen = merge_step.chosen(run, 2, 2)
    periods = timeline_reader.attempts_of(run).periods(2)
    ((_, spans),) = timeline_reader.spans_of_step(tmp_path / "run", 2, periods=periods).items()
    assert (chosen.loop, {(each.end_ns - each.start_ns) / 1e9 for each in spans}) == (2, {3})


def test_a_program_that_starts_again_is_another_attempt(tmp_path: Path) -> None:
    found = figures(programs(tmp_path, "python train.py", "python train.py"))
    assert (found.loops, [row.seconds for row in found.steps]) == ([], [6, 3])


def test_a_run_that_was_started_again_has_attempts(tmp_path: Path) -> None:
    earlier = [{"host": "h", "pid": 1, "started": 1.0, "state": "unfinished"}]
    found = figures(programs(tmp_path, "python train.py", "python train.py --resume", earlier=earlier))
    assert (found.loops, [row.seconds for row in found.steps]) == ([], [6, 3])


def validation(at: float, until: float, **more: Any) -> dict[str, Any]:
    return span("stage", "validate", at, until, **{"step": None, "rank": 0, "stage_kind": "validate", **more})


def samples(number: int, at: float) -> Spans:
    ids = {"sample": 1, "validate": True}
    return [span("sample", "loop", at, at + 1, step=number, role="agent_loop", ids=ids)]


def test_validations_outside_of_steps_have_rows(tmp_path: Path) -> None:
    driver = [validation(0, 12.3), *loop(1, 20, 5, 2), validation(30, 31)]
    run = timeline(tmp_path / "run", driver=driver, agents=samples(0, 1))
    found = figures(run)
    assert [each.text for each in found.validations] == [
        "validation before step 1: 12.3 s",
        "validation after step 2: 1.00 s",
    ]
    assert [(row.number, row.seconds) for row in found.steps] == [(1, 5), (2, 2)]
    assert not [note for note in found.notes if "has no end in the timeline" in note]
    assert "outside of steps: validation before step 1: 12.3 s, validation after step 2: 1.00 s" in shown(found)
    assert "- validation before step 1: 12.3 s" in markdown.text(found)
    assert "<li>Validation before step 1: 12.3 s</li>" in html.page(found)


@pytest.mark.parametrize("in_driver", [True, False])
def test_a_validation_of_any_role_counts_in_the_process_of_the_steps(tmp_path: Path, in_driver: bool) -> None:
    driver, worker = ([validation(0, 12.3, role="rollout")] for _ in range(2))
    steps = loop(1, 20, 5, 2)
    found = figures(timeline(tmp_path / "run", driver=steps + driver * in_driver, worker=worker))
    assert [each.text for each in found.validations] == ["validation before step 1: 12.3 s"] * in_driver


def test_a_validation_before_a_resumed_step_is_not_a_step(tmp_path: Path) -> None:
    resumed = [each for each in loop(1, 20, 5, 2, 3) if each["step"] > 2]
    found = figures(timeline(tmp_path / "run", driver=[validation(0, 9), *resumed], agents=samples(2, 1)))
    assert [each.text for each in found.validations] == ["validation before step 3: 9.00 s"]
    assert not [note for note in found.notes if "has no end" in note]


def test_an_interrupted_step_with_a_validation_is_still_a_step(tmp_path: Path) -> None:
    driver = [*loop(1, 0, 5), span("stage", "work 1", 5, 6, step=2, rank=0), validation(6, 9, step=2)]
    found = figures(timeline(tmp_path / "run", driver=driver, agents=samples(2, 7)))
    assert "step 2 has no end in the timeline: interrupted, or still running" in found.notes
    assert found.validations == []


def test_a_validation_belongs_to_the_loop_that_has_begun(tmp_path: Path) -> None:
    driver = [*loop(1, 0, 5, 2), validation(8, 9), validation(18, 19), *loop(2, 20, 4, before_s=3.0)]
    found = figures(timeline(tmp_path / "run", driver=driver))
    assert [[each.text for each in part.validations] for part in found.loops] == [
        ["validation after step 2: 1.00 s"],
        ["validation before step 1: 1.00 s"],
    ]


@pytest.mark.parametrize(("inside", "kind"), [(False, ""), (True, ""), (False, "validate")])
def test_doctor_names_a_stage_that_never_runs_in_a_step(tmp_path: Path, inside: bool, kind: str) -> None:
    more = {"rank": 0, "stage_kind": kind}
    driver = [each for number in (1, 2, 3) for each in [
        step(10 * number + 5, number, 10 * number, rank=0),
        span("stage", "log", 10 * number + 6, 10 * number + 7, step=None, **more),
    ]]  # fmt: skip
    if inside:
        driver.append(span("stage", "log", 21, 22, step=2, **more))
    run = timeline(tmp_path / "run", driver=driver)
    problems = doctor.examine_run(runs.read(run)).problems
    assert [
        each for each in problems if each.startswith("stage log of trainer ran 2 times between steps and never")
    ] == ([problems[0]] if not inside and not kind else [])


def test_loops_are_the_same_with_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = two_loops(tmp_path)
    expected = figures(run).loops
    monkeypatch.setattr(layout, "WORTH_BYTES", 0)
    for _ in range(2):  # the first report writes the cache
        assert figures(run).loops == expected
        (details,) = build.figures(runs.read(run), [2], loop=2).details
        assert details.seconds == 4
    assert merge_step.chosen(runs.read(run), 2, 2).loop == 2
    assert timeline_reader.attempts_of(runs.read(run)).loops[2].trainer == "GRPOTrainer"
