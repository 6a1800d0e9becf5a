"""Open spans in `ls`, `report` and `merge`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import msgspec
import pytest

from autoprof.base.identity import HOST
from autoprof.cli.main import main
from autoprof.report import build, html, markdown
from autoprof.rundir import processes, runs
from autoprof.rundir.processes import ELSEWHERE, GONE, RUNNING, ProcessState
from autoprof.rundir.records import OpenSpan
from tests.support.hung_runs import MIN, HungRun
from tests.support.traces import load

# No process has this number: pid_max is 2 ** 22 at most.
GONE_PID = 9_000_001


def made(folder: Path, running: bool = True, minutes: float = 2) -> HungRun:
    """A run with an open step, the stage of a worker, and samples."""
    run = HungRun(folder / "20260101-000000-abcdef", minutes, running, steps=1)
    stage = run.begun("stage", "update_actor", "actor", 3, 1.5)
    samples = [
        run.begun("tool", "search", "agent_loop", None, 1 + number / 100, ids={"sample": str(number)})
        for number in range(60)
    ]
    run.process(7, [stage, *samples], host="n2")
    return run


def test_the_report_lists_steps_and_stages_first_then_the_oldest_samples(tmp_path: Path) -> None:
    run = made(tmp_path)
    figures = build.figures(runs.read(run.folder))
    assert [(each.kind, each.name, each.step, each.where) for each in figures.open[:3]] == [
        ("step", "step", 2, "trainer rank 0"),
        ("stage", "update_actor", 2, "actor rank 3"),
        ("tool", "search", 2, "agent_loop sample 59"),
    ]
    assert figures.open[0].state == RUNNING
    assert figures.open[1].state == ELSEWHERE
    assert figures.open[1].process == "n2 7"
    assert 90 <= figures.open[1].age_s < 120 + time.time() - run.now / 1e9
    assert (len(figures.open), figures.open_left_out, figures.going_on) == (52, 10, True)
    text = markdown.text(figures)
    assert "## Open now" in text
    assert "| stage update_actor | 2 | actor rank 3 | n2 7 | " in text
    assert "47 other spans are open." in text
    page = html.page(figures)
    assert '<section id="open">\n<h2>Open now</h2>' in page
    assert "10 more are open." in page


def test_an_open_step_without_an_ended_stage_has_no_report(tmp_path: Path) -> None:
    run = made(tmp_path)
    with pytest.raises(runs.NotFound, match=r"^step 2 of .* has no end, and no stage in it has one; autoprof doctor "):
        build.figures(runs.read(run.folder), [2])


def test_of_a_run_that_was_killed_each_process_has_its_own_last_sign_of_life(tmp_path: Path) -> None:
    run = HungRun(tmp_path / "run", 2, running=False, steps=1)
    (path,) = (run.folder / "journal").iterdir()
    stage = run.begun("stage", "reward", "trainer", 0, 1)
    path.write_text(path.read_text() + json.dumps(stage, separators=(",", ":")) + "\n")
    path.rename(path.with_name(f"{HOST}-{GONE_PID}.jsonl"))
    run.process(7, [run.begun("stage", "update_actor", "actor", 3, 0.5)], host="n2")
    info = json.loads((run.folder / "run.json").read_text())
    (run.folder / "run.json").write_text(json.dumps(info | {"state": "running", "pid": GONE_PID}))
    figures = build.figures(runs.read(run.folder))
    assert figures.state == "unfinished"
    # The stage began a minute after the step. Nothing was written later.
    assert [(each.name, each.age_s) for each in figures.open] == [("step", 60), ("update_actor", 0), ("reward", 0)]
    text = markdown.text(figures)
    assert "## Open at its end" in text
    assert f"| step | 2 | trainer rank 0 | {HOST} {GONE_PID} | at least 60.0 s |" in text
    assert "| stage update_actor | 2 | actor rank 3 | n2 7 | an unknown time |" in text
    assert ">at least 60.0 s<" in html.page(figures)


def state(kind: str, last: int, *steps: int, host: str = "h") -> ProcessState:
    """A process with open steps, by their starts."""
    spans = [OpenSpan(kind="step", name="step", step=start, start_ns=start) for start in steps]
    file = "journal/h-1.jsonl"
    return ProcessState(host=host, pid=1, ticks=0, state=kind, error="", last_ns=last, spans=spans, file=file)


def test_the_end_of_what_is_open_is_now_or_the_last_sign_of_life_of_its_own_process() -> None:
    states = [state(RUNNING, 5), state(GONE, 7), state(ELSEWHERE, 8)]
    assert processes.ends(states, True, 100) == [100, 7, 100]
    assert processes.ends(states, False, 100) == [100, 7, 8]
    assert processes.ends(states, True, 100, {"h": 30}) == [70, 7, 70]


def test_what_the_run_has_left_behind_is_not_open() -> None:
    def left(states: list[ProcessState], started: int, **shifts: int) -> list[list[int]]:
        return [[span.start_ns for span in each.spans] for each in processes.without_past(states, started, shifts)]

    # Before the last attempt; a process that is running is never left behind.
    assert left([state(GONE, 7, 5), state(ELSEWHERE, 7, 5), state(RUNNING, 7, 5)], 8) == [[], [], [5]]
    assert left([state(GONE, 7, 5), state(ELSEWHERE, 7, 5)], 7) == [[5], [5]]
    # Before a later step. A process of another host may still be at work.
    assert left([state(GONE, 7, 5), state(ELSEWHERE, 7, 5), state(RUNNING, 9, 8)], 1) == [[], [5], [8]]
    assert left([state(GONE, 7, 5), state(RUNNING, 9, 6)], 1) == [[5], [6]]
    # By the clock that all hosts share.
    assert left([state(GONE, 7, 5), state(RUNNING, 9, 8, host="n2")], 1, n2=-2) == [[5], [8]]


def test_a_dump_is_a_sign_of_life_unless_the_run_was_copied(tmp_path: Path) -> None:
    run = HungRun(tmp_path / "run", 2, running=False, steps=1)
    (path,) = (run.folder / "journal").iterdir()
    path = path.rename(path.with_name(f"{HOST}-{GONE_PID}.jsonl"))
    crash = run.folder / "crashes" / f"{HOST}-{GONE_PID}.txt"
    crash.parent.mkdir()
    crash.write_text("")
    assert processes.read(run.folder)[0].last_ns == run.began
    stacks = run.folder / "hangs" / "step_000002" / f"{HOST}-{GONE_PID}.json"
    stacks.parent.mkdir(parents=True)
    os.utime(path, ns=(run.began, run.began))
    for minutes, dump in enumerate((crash, stacks), 1):
        dump.write_text("Fatal Python error: Aborted\n")
        os.utime(dump, ns=(run.began, run.began + minutes * MIN))
        assert processes.read(run.folder)[0].last_ns == run.began + minutes * MIN
    os.utime(path, ns=(run.began, run.began + 2 * MIN))
    assert processes.read(run.folder)[0].last_ns == run.began


def test_a_run_in_which_nothing_is_open_has_no_such_section(tmp_path: Path) -> None:
    run = HungRun(tmp_path / "run", steps=1)
    next(iter((run.folder / "journal").iterdir())).unlink()
    figures = build.figures(runs.read(run.folder))
    assert figures.open == []
    assert "Open" not in markdown.text(figures)
    assert '<section id="open">' not in html.page(figures)


def test_ls_shows_the_open_step_and_stage_of_a_run_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path)
    assert main(["ls", "--dir", str(tmp_path)]) == 0
    assert "running, step 2 for 2 min " in " ".join(capsys.readouterr().out.split())
    assert main(["ls", str(run.folder), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["runs"]
    assert [(each["name"], each["step"]) for each in listed["open"]] == [("step", 2), ("update_actor", 2)]
    assert listed["open"][1]["age_s"] >= 90


def test_ls_names_the_loop_of_the_open_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path)
    run.process(8, [run.begun("step", "step", "trainer", 0, 1, ids={"loop": 2})], host="n2")
    assert main(["ls", "--dir", str(tmp_path)]) == 0
    assert "running, step 2 (loop 2) for " in " ".join(capsys.readouterr().out.split())


def test_ls_says_nothing_of_what_is_open_of_a_run_that_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path, running=False)
    assert main(["ls", "--dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["open"] == []


def test_merge_draws_what_is_open_up_to_the_last_known_moment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path)
    output = tmp_path / "merged.json.gz"
    assert main(["merge", str(run.folder), "--step", "2", "-o", str(output), "--clocks", "as-set"]) == 0, capsys
    spans = {event["name"]: event for event in load(output)["traceEvents"] if event["ph"] == "X"}
    assert set(spans) == {"step (open)", "update_actor (open)", "search (open)"}
    assert spans["step (open)"]["dur"] >= 2 * MIN / 1e3
    assert spans["step (open)"]["args"]["open"] == RUNNING
    assert spans["update_actor (open)"]["args"]["open"] == ELSEWHERE
    assert spans["update_actor (open)"]["dur"] >= 1.5 * MIN / 1e3


def test_a_step_that_was_open_and_ran_again_is_not_open_any_more(tmp_path: Path) -> None:
    run = HungRun(tmp_path / "run", steps=1)
    path = next(iter((run.folder / "journal").iterdir()))
    begun = run.begun("step", "step", "trainer", 0, 1)
    ended = run.line("step", "step", "trainer", 0, begun["start_ns"], 30.0)
    more = "".join(msgspec.json.encode(line).decode() + "\n" for line in (begun, ended))
    path.write_text(path.read_text() + more)
    assert build.figures(runs.read(run.folder)).open == []
