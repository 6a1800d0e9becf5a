"""`autoprof report` on the command line: its output, its files, and comparisons of steps and runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoprof.cli import main
from autoprof.cli.report import show
from autoprof.report import build, markdown
from autoprof.report.build import ReportRequest
from autoprof.report.model import Comparison, ComparisonRow, Finding, RunFigures
from autoprof.rundir import runs as run_reader
from tests.support import helpers
from tests.support.helpers import Autoprof
from tests.support.report_runs import BASE_NS, START_NS, capture, training, write
from tests.support.timelines import span, step, timeline
from tests.support.traces import kineto, save

SLOW, USUAL = "20261120-101010-aaaaaa", "20261121-111111-bbbbbb"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a slow tool in step 7 and a slow rank in step 9, and a healthy one."""
    parent = tmp_path_factory.mktemp("runs")
    write(parent / SLOW, slow_tool=7, slow_rank=9)
    write(parent / USUAL, seed=3)
    return parent


def test_findings_are_printed_and_the_page_is_in_the_run(autoprof: Autoprof, runs: Path) -> None:
    done = autoprof("report", SLOW, "--dir", str(runs))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.match(rf"{SLOW}: 3\d\.\d s a step \(10 regular steps; 1 warm-up, 1 captured\), ", lines[0])
    assert lines[2].split() == ["stage", "seconds", "share", "median"]
    assert [line.split()[0] for line in lines[3:5]] == ["gen", "update_actor"]
    findings = lines.index("costs   finding")
    assert lines[findings - 2].split()[0] == "other"
    assert "tool python took 15.0 s in prompt 9, rollout 2" in lines[findings + 1]
    assert "journal/n2-401.jsonl" in lines[findings + 1]
    assert lines[findings + 2 : findings + 4] == [
        "        Set a timeout for the tool.",
        f"        autoprof report {runs / SLOW} --step 7",
    ]
    assert "actor rank 5 was slow in update_actor" in lines[findings + 4]
    assert lines[-1] == f"report: {runs / SLOW / 'report.html'}"
    page = (runs / SLOW / "report.html").read_text()
    assert "tool python took 15.0 s" in page
    assert not list((runs / SLOW).glob("*.part"))


@pytest.mark.fault("a report of one step, or against a run", "gets a name of its own", "nothing: report.html stays")
def test_only_the_report_of_the_whole_run_has_its_name(
    autoprof: Autoprof, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = runs / SLOW / "report.html"
    assert autoprof("report", SLOW, "--dir", str(runs)).returncode == 0
    content = whole.read_bytes()
    for options, name in (
        (["--step", "7"], "report.step7.html"),
        (["--step", "7", "--against", "5"], f"report.step7.against.{SLOW}.step5.html"),
        (["--against", USUAL], f"report.against.{USUAL}.html"),
    ):
        done = autoprof("report", SLOW, "--dir", str(runs), *options)
        assert done.stdout.splitlines()[-1] == f"report: {runs / SLOW / name}"
        assert (runs / SLOW / name).is_file()
    other = runs / USUAL / "report.html"
    for options in (
        ["--step", "7", "-o", str(whole)],
        ["--against", USUAL, "-o", str(whole)],
        ["-o", str(other)],
        ["--against", USUAL, "-o", str(other)],
        ["--md", str(whole)],
    ):
        assert main.main(["report", SLOW, "--dir", str(runs), *options]) == 2
        assert "reserved for the report of the whole run" in capsys.readouterr().err
    assert (whole.read_bytes() == content, other.exists()) == (True, False)


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_takes_every_line_whole(
    columns: int, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    show(build.figures(run_reader.read(runs / SLOW)))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= columns
    first = lines.index("costs   finding") + 1
    found = [line for line in lines[first:] if line]
    assert len(found) == {80: 4, 200: 2}[columns]
    assert found[0].startswith("10.9 s  step 7: generation waited 10.9 s for 1 of 64 samples")
    assert found[-1].endswith("journal/n2-205.jsonl")


def test_a_step_is_shown_by_its_own_stages_and_findings(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(build.figures(run_reader.read(runs / SLOW), [7]), 7)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{SLOW}, step 7 (regular): 48.")
    assert [word for word in lines[3].split() if word.startswith(("gen", "27", "16"))] == ["gen", "27.6", "16.6"]
    assert not [line for line in lines if "step 9" in line]


def test_a_run_of_few_steps_says_how_far_that_can_be_told(tmp_path: Path) -> None:
    write(tmp_path / "few", steps=3, captured=None)
    verdict = build.figures(run_reader.read(tmp_path / "few")).verdict
    assert verdict == "No findings. Slow-step detection needs 4 regular steps; this run has 2."
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "run.json").write_text("{}")
    assert (
        build.figures(run_reader.read(tmp_path / "none")).verdict == "No step has ended, so there is nothing to judge."
    )
    (next((tmp_path / "few" / "journal").iterdir())).open("a").write('{"kind": "st')
    assert "some data could not be read" in build.figures(run_reader.read(tmp_path / "few")).verdict


def test_the_json_is_the_figures(autoprof: Autoprof, runs: Path, tmp_path: Path) -> None:
    done = autoprof("report", SLOW, "--dir", str(runs), "--step", "7", "--json")
    assert done.returncode == 0, done.stderr
    figures = msgspec.json.decode(done.stdout, type=RunFigures)
    assert figures == build.report_figures(ReportRequest(run=run_reader.read(runs / SLOW), step=7))
    page = tmp_path / "page.html"
    both = autoprof("report", SLOW, "--dir", str(runs), "--step", "7", "--json", "-o", str(page))
    assert json.loads(both.stdout) == json.loads(done.stdout)
    assert (both.stderr, page.is_file()) == (f"report: {page}\n", True)


def test_markdown(autoprof: Autoprof, runs: Path) -> None:
    done = autoprof("report", SLOW, "--dir", str(runs), "--md", "-")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"# autoprof: {SLOW}\n")
    assert "\n- **1" in done.stdout
    assert "tool python took 15.0 s in prompt 9, rollout 2" in done.stdout
    assert re.search(r"\| gen \| generate \| 2 min \d+ s \| 4\d % \| 1", done.stdout)
    tables = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(tables) > 20
    assert all(line.endswith("|") for line in tables)


def test_why_a_step_was_captured_is_said_where_that_was_no_setting_of_steps(autoprof: Autoprof, tmp_path: Path) -> None:
    run = tmp_path / SLOW
    write(run)
    why = "step 4 took 92.1 s, 2.1 times the median of 44.0 s (step>2x)"
    slowest = "slowest:1: rank 3 took <b>"
    captured = [step.number for step in run_reader.read(run).steps]
    for path in run.glob("global_step_*/*.meta.json"):
        said = {"window": why, "slowest": slowest} if f"{captured[0]:06d}" in path.parent.name else {}
        said = said or {"window": "AUTOPROF_STEPS=5"}
        path.write_text(json.dumps(json.loads(path.read_text()) | said))
    figures = build.figures(run_reader.read(run), captured)
    assert [step.captured_for for step in figures.details] == [[why], *([] for _ in captured[1:])]
    done = autoprof("report", str(run))
    assert f"step {captured[0]} was captured for: {why}\n" in done.stdout
    assert done.stdout.count("was captured for") == 1
    page = (run / "report.html").read_text()
    assert page.count("<p>Captured for: step 4 took 92.1 s, 2.1 times the median of 44.0 s (step&gt;2x)</p>") == 1
    assert "<p>slowest:1: rank 3 took &lt;b&gt;</p>" in page
    text = markdown.text(figures)
    assert text.count("\nCaptured for: step 4 took") == 1
    assert "slowest:1: rank 3 took" in text


def test_names_in_markdown_are_text(runs: Path) -> None:
    figures = build.figures(run_reader.read(runs / USUAL), [5])
    bad = "<img src=x onerror=alert(1)> `a` **b** [c](http://d) | e\n# f @all __init__ ~~no~~ $x$ old_log_prob"
    finding = Finding(kind="slow_tool", text=bad, evidence=[bad], seconds=1.0, file=bad)
    text = markdown.text(msgspec.structs.replace(figures, findings=[finding], command=bad))
    shown = [line for line in text.splitlines() if "onerror" in line]
    assert len(shown) == 4
    for line in shown:
        outside = "".join(line.split("`")[::2]) if line.count("`") == 2 else line
        for live in ("<img", " **b**", "[c](", "@all", " __init__", "~~no~~", "$x$"):
            assert live not in outside
    assert "\n# f" not in text
    # An underscore within a word is not escaped.
    assert " old_log_prob" in shown[0]


def test_names_from_traces_in_markdown_are_text(tmp_path: Path) -> None:
    script = write(tmp_path / "run", captured=None)
    who = {"role": "actor", "stage": "update_actor", "rank": 0}
    when = script.stages[4, "update_actor"]
    events = [event | {"cat": "<img src=x>|`"} for event in training(when) if event.get("cat") == "cpu_op"]
    capture(tmp_path / "run", 4, "actor.update_actor.rank0", who, ("n1", 200), when, events)
    text = markdown.text(build.figures(run_reader.read(tmp_path / "run"), [4]))
    (row,) = [line for line in text.splitlines() if line.startswith("| `aten::mm`")]
    assert "&lt;img src=x&gt;\\|\\`" in row
    assert "<img" not in text


def test_markdown_of_many_captures_has_the_first_of_each_stage(tmp_path: Path) -> None:
    script = write(tmp_path / "run", captured=None)
    when = script.stages[4, "update_actor"]
    for rank in range(40):
        who = {"role": "actor", "stage": "update_actor", "rank": rank}
        capture(tmp_path / "run", 4, f"actor.update_actor.rank{rank}", who, ("n1", 200 + rank), when, [])
    text = markdown.text(build.figures(run_reader.read(tmp_path / "run"), [4]))
    assert text.count("\n### actor.update_actor rank") == 8
    assert "8 other captures of this step are in the page and the JSON." in text
    assert "24 captures of further ranks were not read." in text


def test_two_steps_of_a_run(autoprof: Autoprof, runs: Path) -> None:
    done = autoprof("report", SLOW, "--dir", str(runs), "--step", "7", "--against", "5", "--json")
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(json.dumps(json.loads(done.stdout)["comparison"]), type=Comparison)
    assert (found.a, found.b) == ("step 5", "step 7")
    stage, *rest = found.findings
    assert (stage.kind, stage.step) == ("slower_stage", 7)
    assert stage.text.startswith("gen takes 2")
    assert [finding.kind for finding in rest] == ["fewer_tokens"]
    assert [row.kind for row in found.rows[:2]] == ["step", "rate"]
    changes = [row.change for row in found.rows[2:]]
    assert changes == sorted(changes, reverse=True)
    longest = next(row for row in found.rows if row.name == "longest sample")
    assert longest.worse
    assert longest.change == pytest.approx(11, abs=3)


def test_two_runs(runs: Path) -> None:
    figures = build.report_figures(
        ReportRequest(run=run_reader.read(runs / SLOW), against=run_reader.read(runs / USUAL))
    )
    assert figures.comparison is not None
    assert (figures.comparison.a, figures.comparison.b) == (USUAL, SLOW)
    # Two slow steps of twelve don't change the median.
    assert figures.comparison.findings == []
    assert figures.id == SLOW


def test_runs_of_two_trainers_are_paired_by_the_kinds_of_their_stages(tmp_path: Path) -> None:
    """verl times `gen` in its driver; another trainer calls it `sampler`, and its recipe gives the kind."""
    verl, other = tmp_path / USUAL, tmp_path / SLOW
    old = [span("timer", "gen", 0, 4), span("timer", "update_actor", 4, 7), span("timer", "mine", 7, 8)]
    new = [
        span("stage", "sampler", 0, 7, stage_kind="generate"),
        span("stage", "update_actor", 7, 8),
        span("stage", "extra", 8, 9),
    ]
    timeline(verl, node1=[*old, step(8)])
    timeline(other, node1=[*new, step(9)])
    figures = build.report_figures(ReportRequest(run=run_reader.read(other), against=run_reader.read(verl)))
    assert figures.comparison is not None
    rows = {row.name: (row.a, row.b, row.where) for row in figures.comparison.rows if row.kind == "stage"}
    assert rows["generate"] == (4.0, 7.0, "gen | sampler")
    assert rows["update_actor"] == (3.0, 1.0, "")
    assert rows["mine"] == (1.0, None, "")
    assert rows["extra"] == (None, 1.0, "")
    assert figures.comparison.findings[0].text == f"generate takes 7.00 s in {SLOW}, 4.00 s in {USUAL} (sampler | gen)"
    assert figures.comparison.findings[1].text == f"extra takes 1.00 s in {SLOW}, {USUAL} has none"
    assert {stage.name: stage.kind for stage in figures.stages}["sampler"] == "generate"
    assert {kind.name: kind.seconds for kind in figures.kinds} == {"generate": 7.0, "update_actor": 1.0}
    assert figures.steps[0].kinds == {"sampler": "generate"}


def test_an_optimizers_step_of_its_own_is_part_of_the_update_where_the_other_trainer_has_none(tmp_path: Path) -> None:
    trl, verl = tmp_path / USUAL, tmp_path / SLOW
    timeline(trl, node1=[span("stage", "update_actor", 0, 4), span("stage", "optimizer_step", 4, 6), step(8)])
    timeline(verl, node1=[span("timer", "update_actor", 0, 7), step(8)])
    figures = build.report_figures(ReportRequest(run=run_reader.read(verl), against=run_reader.read(trl)))
    assert figures.comparison is not None
    rows = {row.name: (row.a, row.b, row.where) for row in figures.comparison.rows if row.kind == "stage"}
    assert rows == {"update_actor": (6.0, 7.0, "update_actor, optimizer_step | update_actor"), "other": (2.0, 1.0, "")}


def test_stages_of_one_trainer_keep_their_names(tmp_path: Path) -> None:
    timeline(tmp_path / USUAL, node1=[span("timer", "gen", 0, 4), step(8)])
    timeline(tmp_path / SLOW, node1=[span("timer", "gen", 0, 4), span("timer", "testing", 4, 7), step(8)])
    figures = build.report_figures(
        ReportRequest(run=run_reader.read(tmp_path / SLOW), against=run_reader.read(tmp_path / USUAL))
    )
    assert figures.comparison is not None
    assert {row.name for row in figures.comparison.rows if row.kind == "stage"} >= {"gen", "testing"}


def test_captures_of_two_trainers_are_paired_by_kind(tmp_path: Path) -> None:
    sides = []
    for run, stage, kind in ((USUAL, "learn", "update_actor"), (SLOW, "update_actor", "")):
        script = write(tmp_path / run, captured=None)
        who = {"role": "trainer", "stage": stage, "stage_kind": kind, "rank": 0}
        when = script.stages[4, "update_actor"]
        capture(tmp_path / run, 4, f"trainer.{stage}.rank0", who, ("n1", 200), when, training(when))
        sides.append(ReportRequest(run=run_reader.read(tmp_path / run), step=4))
    both = msgspec.structs.replace(sides[1], against=sides[0].run, against_step=4)
    figures = build.report_figures(both)
    assert figures.comparison is not None
    places = {row.where for row in figures.comparison.rows if row.kind == "operator"}
    assert places == {"update_actor"}


def against(tmp_path: Path, *sides: list[dict[str, Any]]) -> list[ComparisonRow]:
    """The operators of two runs that captured the same work, each under its own names, in one step."""
    made = []
    for run, captures in zip((USUAL, SLOW), sides, strict=True):
        script = write(tmp_path / run, captured=None)
        for number, who in enumerate(captures):
            begin, end = when = script.stages[4, "update_actor"]
            own = {"ph": "X", "cat": "user_annotation", "name": f"{who['role']}.{who['stage']}", "pid": 1, "tid": 1}
            own |= {"ts": (START_NS - BASE_NS) / 1e3 + begin * 1e6, "dur": (end - begin) * 1e6}
            events = [own] if who.get("part") == "frontend" else [*training(when), own]
            capture(tmp_path / run, 4, f"{who['stage']}{number}", {"rank": 0, **who}, ("n1", 200), when, events)
        made.append(ReportRequest(run=run_reader.read(tmp_path / run), step=4))
    figures = build.report_figures(msgspec.structs.replace(made[1], against=made[0].run, against_step=4))
    assert figures.comparison is not None
    return [row for row in figures.comparison.rows if row.kind == "operator"]


def test_a_capture_that_the_other_side_lacks_is_compared_with_nothing(tmp_path: Path) -> None:
    update = {"role": "actor", "stage": "update_actor"}
    rows = against(tmp_path, [update], [update, {"role": "actor", "stage": "save_checkpoint"}])
    assert {row.where for row in rows} == {"actor.update_actor rank 0"}
    assert {row.change for row in rows} == {0.0}
    assert {"rest of the stage", "aten::mm"} <= {row.name for row in rows}


def test_an_engines_worker_is_paired_with_generation_and_its_front_end_is_not(tmp_path: Path) -> None:
    engine = {"role": "rollout", "stage": "rollout", "stage_kind": "generate", "replica": 0}
    rows = against(
        tmp_path,
        [{"role": "rollout", "stage": "generate", "stage_kind": "generate"}],
        [engine | {"part": "rank0"}, engine | {"part": "frontend"}],
    )
    assert {row.where for row in rows} == {"generate"}
    # Neither a name of autoprof's own ranges nor the front end makes a difference.
    assert {(row.change, row.a is None, row.b is None) for row in rows} == {(0.0, False, False)}


def test_a_step_against_another_runs(autoprof: Autoprof, runs: Path) -> None:
    done = autoprof("report", SLOW, "--dir", str(runs), "--step", "9", "--against", f"{USUAL}:4", "--md", "-")
    assert done.returncode == 0, done.stderr
    assert f"## {SLOW} step 9 against {USUAL} step 4" in done.stdout
    assert "update_actor takes 22." in done.stdout


def test_captures_without_a_timeline_are_compared_too(tmp_path: Path) -> None:
    """The limit of 3 % then applies to the capture, so an operator that grew a little is not a finding."""
    script = write(tmp_path / "run", captured=None)
    who = {"role": "actor", "stage": "update_actor", "rank": 0}
    when = script.stages[4, "update_actor"]
    for number, more in ((3, 1.0), (4, 2.0)):
        events = training(when)
        for event in events:
            if event["name"] == "aten::bmm":
                event["dur"] *= more
            if event["name"] == "sm90_xmma_gemm_bf16bf16_bf16f32":
                event["dur"] *= 0.5 * more
        capture(tmp_path / "run", number, "actor.update_actor.rank0", who, ("n1", 200), when, events)
    for path in (tmp_path / "run" / "journal").iterdir():
        path.unlink()
    for path in (tmp_path / "run").glob("global_step_*/*.meta.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"clock": {}}))
    run = run_reader.read(tmp_path / "run")
    figures = build.report_figures(ReportRequest(run=run, step=4, against=run, against_step=3))
    assert figures.comparison is not None
    (finding,) = figures.comparison.findings
    assert finding.text.startswith("sm90_xmma_gemm")


def test_a_slower_operator_is_named(tmp_path: Path) -> None:
    script = write(tmp_path / "run", captured=None)
    who = {"role": "actor", "stage": "update_actor", "rank": 0}
    for number, slower in ((3, 1.0), (4, 4.0)):
        when = script.stages[number, "update_actor"]
        events = training(when)
        for event in events:
            if event["name"] == "aten::bmm":
                event["dur"] *= slower * 10
        capture(tmp_path / "run", number, "actor.update_actor.rank0", who, ("n1", 200), when, events)
    run = run_reader.read(tmp_path / "run")
    figures = build.report_figures(ReportRequest(run=run, step=4, against=run, against_step=3))
    assert figures.comparison is not None
    (finding,) = figures.comparison.findings
    assert finding.kind == "slower_operator"
    assert finding.text.startswith("aten::bmm takes ")
    assert "actor.update_actor rank 0" in finding.text
    row = next(row for row in figures.comparison.rows if row.name == "aten::bmm")
    assert row.a is not None
    assert row.b == pytest.approx(4 * row.a, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["report", "nothing"], 1, "no run matches 'nothing'"),
        (["report", SLOW, "--step", "99"], 1, "has no step 99; steps in its timeline: 1-12; captured steps: 5"),
        (["report", SLOW, "--against", "5"], 2, "--against 5 is a step; name with --step the step"),
        (["report", SLOW, "--against", "99", "--step", "5"], 1, "has no step 99"),
        (["report", SLOW, "--against", f"{USUAL}:x"], 2, "'x' is not a step"),
        (["report", SLOW, "--against", "nothing"], 1, "no run matches 'nothing'"),
        (["report", SLOW, "--json", "--md", "-"], 2, "can't both go to standard output"),
        (
            ["report", SLOW, "--md", "/no/such/folder/x.md"],
            1,
            "report: /no/such/folder/x.md: No such file or directory",
        ),
        (["report", SLOW, "-o", "/no/such/folder/x.html"], 1, "report: /no/such/folder/x.html: No such file or "),
    ],
)
def test_what_is_wrong_is_said(
    runs: Path, arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([*arguments, "--dir", str(runs)]) == status
    assert said in capsys.readouterr().err


def test_a_reader_that_has_enough_is_no_error(runs: Path) -> None:
    command = [sys.executable, "-u", "-m", "autoprof", "report", SLOW, "--dir", str(runs), "--md", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_without_the_extra_it_says_what_to_install(autoprof: Autoprof, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "jinja2.py").write_text("raise ImportError('no jinja2')")
    done = autoprof("report", USUAL, "--dir", str(runs), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    needs = "the HTML report needs jinja2: pip install 'autoprof-rl[report]'; --json and --md work without"
    assert done.stderr == f"autoprof: report: {needs}\n"
    assert "No findings." in done.stdout
    done = autoprof("report", USUAL, "--dir", str(runs), "--md", "-", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0


def test_other_commands_load_none_of_it(runs: Path) -> None:
    code = "import sys; from autoprof.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"
    command = [sys.executable, "-c", code, "ls", "--dir", str(runs)]
    loaded = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert "autoprof.cli.ls" in loaded
    assert not {"autoprof.cli.report", "autoprof.report", "autoprof.traces", "jinja2"} & loaded


def test_what_is_no_trace_is_named_with_what_opens_it(tmp_path: Path) -> None:
    write(tmp_path / "run", captured=5)
    folder = tmp_path / "run" / "global_step_000005"
    for name, ending in (("actor.a.rank0.n1.pid200", ".nsys-rep"), ("actor.b.rank0.n1.pid200", ".pickle")):
        (folder / f"{name}{ending}").write_bytes(b"x")
        (folder / f"{name}.meta.json").write_text(json.dumps({"state": "complete", "role": "actor", "rank": 0}))
    ascend = folder / "actor.c.rank0.n1.pid200_200_20261120101010123_ascend_pt"
    (ascend / "PROF_1").mkdir(parents=True)
    (folder / "actor.c.rank0.n1.pid200.meta.json").write_text(json.dumps({"state": "complete", "tool": "npu"}))
    (folder / "actor.d.rank0.n1.pid200.pt.trace.json.gz").write_bytes(b"no gzip at all")
    (folder / "actor.d.rank0.n1.pid200.meta.json").write_text(json.dumps({"state": "complete"}))
    cut = kineto(training((0.0, 1.0)))
    save(folder / "actor.e.rank0.n1.pid200.pt.trace.json.gz", cut[: len(cut) // 2])
    (folder / "actor.e.rank0.n1.pid200.meta.json").write_text(json.dumps({"state": "complete", "rank": 0}))
    figures = build.figures(run_reader.read(tmp_path / "run"), [5])
    found = {capture.name.split(".")[1]: capture for capture in figures.details[0].captures}
    assert (found["a"].tool, found["b"].tool, found["c"].tool) == ("nsys", "memory", "npu")
    assert "nsys-ui" in found["a"].opens_with
    assert "memory_viz" in found["b"].opens_with
    assert "MindStudio Insight" in found["c"].opens_with
    assert found["c"].file == f"global_step_000005/{ascend.name}"
    assert found["d"].state == "damaged"
    assert found["e"].state == "truncated"
    assert found["e"].operators
    bad = [finding for finding in figures.findings if finding.kind == "bad_capture"]
    assert {finding.file for finding in bad} == {found["d"].file, found["e"].file}


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        ("raise ValueError('bad batch')", "the trainer failed with ValueError: bad batch in .* of step 2"),
        ("os.kill(os.getpid(), 9)", r"the trainer vanished in update of step 2 \(killed"),
    ],
)
def test_a_step_in_which_the_process_died_has_this_finding(
    end: str, sentence: str, autoprof: Autoprof, tmp_path: Path
) -> None:
    program = f"""import os, time, autoprof
for number in (1, 2):
    with autoprof.step(number):
        with autoprof.stage("generate"):
            time.sleep(0.01)
        with autoprof.stage("update"):
            if number == 2:
                time.sleep(1.2)
                {end}
"""
    helpers.run([sys.executable, "-c", program], cwd=tmp_path, AUTOPROF="1", AUTOPROF_STEPS="")
    done = autoprof("report", "--step", "2", cwd=tmp_path)
    assert re.search(rf"costs  finding\n-      {sentence}", done.stdout), done.stdout
    report = json.loads(autoprof("report", "--json", "--step", "2", cwd=tmp_path).stdout)
    assert [finding["step"] for finding in report["findings"]] == [2]
    assert not [note for note in report["notes"] if "still running" in note]
    assert "No findings in step 1." in autoprof("report", "--step", "1", cwd=tmp_path).stdout
