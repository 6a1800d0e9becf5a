"""Benchmarks: their statistics, the page of results, one real benchmark, figures of the code, and made large runs."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from autoprof.rundir import file_names, runs
from bench import __main__ as bench
from bench import calls, figures, processes, results, steps
from bench.large_runs import RUN_ID
from bench.paired import Goal, Spread, Table, in_turns, judge
from bench.processes import MAIN
from bench.results import Findings, Section
from tests.support.helpers import autoprof


@pytest.fixture
def table() -> Table:
    """Table of a machine that becomes slower with each turn; only the ratios stay the same."""
    return Table(
        title="Time",
        unit="ms",
        base="bare",
        values={"bare": [1.0, 2.0, 4.0], "ours": [1.1, 2.0, 4.8], "theirs": [3.0, 8.0, 16.0]},
        differences=True,
    )


@pytest.fixture
def section(table: Table) -> Callable[..., Section]:
    """Return a function that makes a section of the results."""

    def make(name: str = "boot", **values: Any) -> Section:
        findings = Findings(tables=[table], goals=[goal(limit=1.2), goal(limit=1.05)], notes=["nothing else"])
        made = {
            "about": "What it costs\n\nTwo lines\nof prose.",
            "machine": "2 cores",
            "date": "2026-11-22",
            "quick": False,
            "turns": 3,
            "minutes": 1.0,
            "findings": findings,
        }
        return Section(name=name, **(made | values))

    return make


def goal(**values: Any) -> Goal:
    made = {"text": f"at most {values['limit']}", "table": "Time", "case": "ours", "remedy": "less of it."}
    return Goal(**(made | values))


def test_few_values_are_shown_whole_and_many_by_their_middle_half() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 100.0]) == (3.0, 2.0, 4.0)
    assert Spread.of([5.0]) == (5.0, 5.0, 5.0)


def test_a_goal_is_judged_by_the_middle_of_the_ratios(table: Table) -> None:
    def met(**values: Any) -> bool | None:
        verdict = judge(goal(**values), [table])
        assert verdict is not None
        return verdict.met

    assert met(limit=1.1001)
    assert met(limit=1.05) is False
    assert met(limit=0.29, base="theirs") is False
    assert met(limit=0.31, base="theirs")


def test_noise_is_the_variation_of_the_base(table: Table) -> None:
    verdict = judge(goal(limit=1.0, within_noise=True), [table])
    assert verdict is not None
    assert (verdict.met, verdict.noise) == (True, 1.5)
    quiet = Table(title="Time", unit="s", base="bare", values={"bare": [1.0, 1.01], "ours": [1.1, 1.1]})
    assert judge(goal(limit=1.0, within_noise=True), [quiet]).met is False  # type: ignore[union-attr]
    once = Table(title="Time", unit="s", base="bare", values={"bare": [1.0], "ours": [1.1]})
    assert judge(goal(limit=1.0, within_noise=True), [once]).met is None  # type: ignore[union-attr]


def test_a_goal_with_a_missing_case_is_not_judged(table: Table) -> None:
    assert judge(goal(limit=1.0, case="absent"), [table]) is None
    assert judge(goal(limit=1.0, table="absent"), [table]) is None


def test_every_case_runs_once_a_turn_in_changing_order() -> None:
    ran: list[str] = []

    def case(name: str) -> Callable[[], dict[str, float]]:
        def measure() -> dict[str, float]:
            ran.append(name)
            return {"Number": len(ran), **({"Only of b": 0.0} if name == "b" else {})}

        return measure

    taken = in_turns({name: case(name) for name in "abc"}, 4, warm=2)
    turns = [ran[at : at + 3] for at in range(0, len(ran), 3)]
    assert [sorted(turn) for turn in turns] == [["a", "b", "c"]] * 6
    assert len({tuple(turn) for turn in turns}) > 1
    assert list(taken["Number"]) == ["a", "b", "c"]
    assert sorted(value for values in taken["Number"].values() for value in values) == list(range(7, 19))
    assert taken["Only of b"] == {"b": [0.0] * 4}


def test_the_page_shows_results_and_missed_goals(section: Callable[..., Section]) -> None:
    page = results.render([section()])
    assert "## boot: What it costs\n\nTwo lines\nof prose.\n" in page
    assert "| ours   | 2.00 | 1.100 (1.000 to 1.200) |     0.10 |" in page
    assert "| boot      | at most 1.05 | 1.100 (1.000 to 1.200) | missed |" in page
    assert "* Goal: at most 1.2. **Met**, 1.100 (1.000 to 1.200).\n" in page
    assert "**Missed**, 1.100 (1.000 to 1.200). To reach it: less of it.\n* nothing else" in page
    assert "2026-11-22, 2 cores; 3 turns, 1.0 min" in page
    assert "A quick run" not in page
    assert "A quick run" in results.render([section(quick=True)])


def test_sections_that_are_not_measured_again_are_kept(section: Callable[..., Section], tmp_path: Path) -> None:
    store, page = tmp_path / "results.json", tmp_path / "RESULTS.md"
    assert results.load(store) == {}
    results.save([section("boot"), section("calls", date="2026-11-01")], store, page)
    results.save((results.load(store) | {"boot": section("boot", date="2026-12-24")}).values(), store, page)
    kept = results.load(store)
    assert {name: each.date for name, each in kept.items()} == {"boot": "2026-12-24", "calls": "2026-11-01"}
    assert page.read_text() == results.render(list(kept.values()))


def test_the_times_of_verls_steps_are_read_from_its_console() -> None:
    line = "(TaskRunner pid=1) step:{} - actor/kl_loss:0.1 - timing_s/gen:0.5 - timing_s/step:{} - perf/mfu:0\n"
    output = line.format(1, "9.75") + "timing_s/step:3\n" + line.format(2, "1.25e+00")
    assert steps.step_times(output) == {1: 9.75, 2: 1.25}


def test_a_benchmark_runs_without_its_peers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "interpreter", lambda peer: None)
    assert bench.main(["--quick", "--keep", str(tmp_path), "calls"]) == 0
    (kept,) = results.load(tmp_path / "results.json").values()
    measured = kept.findings.tables[0].values
    assert {"bare call", calls.WRAPT, calls.PASS} <= measured.keys()
    assert measured["bare call"] < measured[calls.PASS]
    assert any("opentelemetry was not measured" in note for note in kept.findings.notes)
    said = capsys.readouterr().out
    assert "| wrapt.FunctionWrapper" in said
    assert "A quick run" in said


def test_a_failed_benchmark_keeps_its_old_section(
    monkeypatch: pytest.MonkeyPatch, section: Callable[..., Section], tmp_path: Path
) -> None:
    def fail(turns: int) -> Findings:
        raise bench.Failed("verl's run failed")

    results.save([section("steps")], tmp_path / "results.json", tmp_path / "RESULTS.md")
    monkeypatch.setattr(steps, "run", fail)
    assert bench.main(["--keep", str(tmp_path), "steps"]) == 1
    assert results.load(tmp_path / "results.json") == {"steps": section("steps")}


SOURCE = dedent('''\
    """A module
    of two lines."""

    import os  # where


    # A comment.
    class First(Exception):
        """A class."""

        text = """a text that is
        no docstring"""

        def work(self) -> None:
            "A method."
            try:
                os.stat("x")
            except (KeyError, Exception):
                pass
            except OSError:
                pass
            except:
                raise


    class Second:
        def work(self) -> None:
            try:
                pass
            except BaseException as error:
                raise error
    ''')


def test_blocks_that_catch_everything_are_counted() -> None:
    source = """
with seam.guard("a report", log.error_once), open("file"): pass
with seam.suppress(OSError, Exception): pass
with contextlib.suppress(OSError): pass
"""
    assert figures.broad_clauses(ast.parse(source)) == 2


def test_figures_of_a_package_are_sums_over_its_modules(tmp_path: Path) -> None:
    for name in ("package", "tests"):
        (tmp_path / name / "inner").mkdir(parents=True)
        for module in ("one.py", "inner/two.py"):
            (tmp_path / name / module).write_text(SOURCE)
    found = figures.of_code(tmp_path / "package", tmp_path / "tests")
    assert found == {
        **{"modules": 2, "lines of code": 38, "lines of tests": 2 * len(SOURCE.splitlines())},
        **{"broad clauses": 6, "class names used twice": 2},
    }


def test_the_counts_of_a_stage_are_reproducible(tmp_path: Path) -> None:
    found = figures.of_stage(tmp_path / "first", captured=False)
    assert found == figures.of_stage(tmp_path / "second", captured=False)
    assert found["uncaptured stage: files"] < found["uncaptured stage: calls"]
    assert found["uncaptured stage: file operations"] > 0


@pytest.mark.needs("torch")
def test_a_captured_stage_makes_more_calls_than_an_uncaptured_one(tmp_path: Path) -> None:
    captured = figures.of_stage(tmp_path, captured=True)
    other = figures.of_stage(tmp_path, captured=False)
    for name, count in other.items():
        assert captured[name.replace("uncaptured", "captured")] > count


def test_processes_have_files_in_a_run(tmp_path: Path) -> None:
    assert all(count > 0 for count in figures.of_processes(tmp_path).values())


SIZE = ["--ranks", "8", "--steps", "12", "--gpus", "4"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Generate a run of 8 ranks on two hosts, one of them missing; return its folder and the generator's summary."""
    folder = tmp_path_factory.mktemp("runs") / RUN_ID
    summary = processes.run([MAIN, "-m", "bench.large_runs", folder, *SIZE]).output
    return folder, json.loads(summary)


def test_the_generator_prints_a_summary(made: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = made
    found = [path for path in folder.rglob("*") if path.is_file()]
    # The generator writes its exit status after the summary.
    assert summary.pop("bytes") == sum(path.stat().st_size for path in found if path.name != file_names.EXIT)
    assert summary == {
        **{"ranks": 8, "hosts": 2, "missing": "node0001", "steps": 12, "captured": [4, 9], "files": len(found)}
    }


def test_a_made_run_is_read_without_damage(made: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = made
    run = runs.read(folder)
    assert run.left_out == []
    assert run.state == "ended"
    assert [attempt.state for attempt in run.info.earlier] == ["unfinished"]
    # Four ranks of the collected host, with five stages each.
    assert {step.number: len(step.captures) for step in run.steps} == {4: 20, 9: 20}
    assert {capture.state for capture in run.captures} == {"complete"}


def test_workers_write_an_exit_line_if_requested(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder = tmp_path / RUN_ID
    processes.run([MAIN, "-m", "bench.large_runs", folder, *SIZE, "--exits"])
    assert _exits(folder) == ["node0000-5100002", "node0000-5100003", "node0000-5100004", "node0000-5100005"]
    assert _exits(made[0]) == []


def _exits(folder: Path) -> list[str]:
    """Return the processes whose timeline ends with an exit line."""
    return sorted(path.stem for path in folder.glob("journal/*.jsonl") if '{"kind":"exit"' in path.read_text())


def test_commands_report_only_the_missing_host_of_a_made_run(made: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = made
    where = ["--dir", str(folder.parent)]
    doctor = autoprof("doctor", RUN_ID, "--json", *where, cwd=folder.parent)
    assert json.loads(doctor.stdout)["problems"] == ["not collected, node0001: no answer within 60 s"]
    report = json.loads(autoprof("report", RUN_ID, "--json", *where, cwd=folder.parent).stdout)
    assert [step["number"] for step in report["steps"]] == [*range(1, 13)]
    assert [note for note in report["notes"] if note.startswith("journal/")] == []
    listed = autoprof("ls", RUN_ID, *where, cwd=folder.parent)
    assert listed.stdout.count("complete") == 40
    assert listed.stderr == ""
    merged = autoprof("merge", RUN_ID, "--step", "4", *where, cwd=folder.parent)
    assert "20 traces" in merged.stdout
