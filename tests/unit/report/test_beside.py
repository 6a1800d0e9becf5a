"""Several runs beside each other: their figures, what differs between them, and the outputs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from autoprof.report import beside, build, charts, html, markdown
from autoprof.report.beside import RunTable
from autoprof.rundir import runs as run_reader
from tests.support import report_runs
from tests.support.report_pages import HOSTILE
from tests.unit.report.test_loops import two_loops

IDS = ["20261101-010203-aaaaaa", "20261102-010203-bbbbbb", "20261103-010203-cccccc"]
DAY_S = 86_400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: the second has slower weight syncs and another vLLM, the third another learning rate."""
    parent = tmp_path_factory.mktemp("runs")
    for day, (name, weight_sync_s) in enumerate(zip(IDS, (2.0, 6.0, 2.0), strict=True)):
        report_runs.write(parent / name, steps=6, captured=3, weight_sync_s=weight_sync_s)
        file = parent / name / "run.json"
        info = json.loads(file.read_text())
        info["started"] += day * DAY_S
        info["versions"]["vllm"] = "0.28.0" if day == 1 else "0.27.1"
        info["command"] += f" actor.lr={'1e-5' if day == 2 else '1e-6'}"
        file.write_text(json.dumps(info))
    return parent


def table(folder: Path) -> RunTable:
    return beside.table([run_reader.read(folder / name) for name in reversed(IDS)], build.unseen)


def report(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autoprof", "report", *arguments], capture_output=True, text=True, check=False
    )


def test_each_run_has_the_figures_of_its_own_report(folder: Path) -> None:
    rows = table(folder).runs
    assert [row.id for row in rows] == IDS
    for row in rows:
        figures = build.figures(run_reader.read(folder / row.id))
        assert (row.median_s, row.tokens_per_s, row.basis) == (figures.median_s, figures.tokens_per_s, figures.basis)
        means = {stage.name: pytest.approx(stage.seconds / 4) for stage in figures.stages}
        assert row.stages == means
        assert row.steps == 6
    assert rows[1].stages["update_weights"] == pytest.approx(3 * rows[0].stages["update_weights"], rel=0.1)


def test_only_what_differs_is_listed(folder: Path) -> None:
    found = table(folder)
    assert found.versions == ["vllm"]
    assert [row.versions for row in found.runs] == [{"vllm": "0.27.1"}, {"vllm": "0.28.0"}, {"vllm": "0.27.1"}]
    assert [row.words for row in found.runs] == [["actor.lr=1e-6"], ["actor.lr=1e-6"], ["actor.lr=1e-5"]]
    assert found.stages[0] == "gen"
    assert found.stages[-1] == "other"


def test_no_trace_is_read(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "runs")
    for trace in (tmp_path / "runs").glob("*/global_step_*/*.json.gz"):
        trace.write_bytes(b"no trace")
    without_paths = [
        [msgspec.structs.replace(row, path="") for row in table(place).runs] for place in (folder, tmp_path / "runs")
    ]
    assert without_paths[0] == without_paths[1]


def test_a_folder_or_several_names(folder: Path, tmp_path: Path) -> None:
    whole = report(str(folder), "--json")
    named = report(*IDS, "--dir", str(folder), "--json", "-o", str(tmp_path / "x.html"))
    assert (whole.returncode, whole.stdout) == (0, named.stdout)
    assert [row["id"] for row in json.loads(whole.stdout)["runs"]] == IDS
    assert "x.html" in named.stderr
    done = report(str(folder))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:4] == ["run", "started", "steps", "median"]
    assert lines[4] == "the seconds of a stage are the mean of the same steps"
    assert [line.split()[0] for line in lines[1:4]] == IDS
    assert f"{IDS[2]}: actor.lr=1e-5" in lines
    assert lines[-1] == f"report: {folder / 'runs.html'}"
    text = report(str(folder), "--md", "-").stdout
    assert f"| {IDS[1]} | 0.28.0 |" in text
    assert "## Different commands" in text


def test_one_run_is_needed_for_a_step(folder: Path) -> None:
    for more in (["--step", "3"], ["--loop", "2"], ["--against", IDS[0]]):
        done = report(*IDS[1:], "--dir", str(folder), *more)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"autoprof: report: {more[0]} takes one run; got {IDS[1]}, {IDS[2]}\n"


def test_a_run_without_steps_has_a_row(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "20261109-010203-dddddd"
    empty.mkdir()
    (empty / "run.json").write_text('{"id": "x", "started": 1, "command": "it\'s"}')
    found = beside.table([run_reader.read(empty), run_reader.read(folder / IDS[0])], build.unseen)
    assert (found.runs[0].median_s, found.runs[0].stages, found.runs[0].words) == (None, {}, ["it's"])
    assert "20261109-010203-dddddd" in html.runs_page(found)
    assert html.runs_page(beside.table([run_reader.read(empty)], build.unseen))


def test_a_run_with_several_loops_has_a_row_for_each(folder: Path, tmp_path: Path) -> None:
    found = beside.table([run_reader.read(two_loops(tmp_path)), run_reader.read(folder / IDS[0])], build.unseen)
    loops = [row for row in found.runs if row.loop]
    assert [(row.label, row.steps, row.median_s, row.stages) for row in loops] == [
        ("run, loop 1 (SFTTrainer)", 3, 2, {"work 1": 2, "other": 0}),
        ("run, loop 2 (GRPOTrainer)", 3, 4, {"work 2": 4, "other": 0}),
    ]
    assert (found.count, len(found.runs)) == (2, 3)
    for text in (html.runs_page(found), markdown.text_of_runs(found)):
        assert "run, loop 2 (GRPOTrainer)" in text
        assert "2 runs" in text


def test_names_stay_text_in_the_page(folder: Path) -> None:
    found = table(folder)
    row = msgspec.structs.replace(found.runs[0], id=HOSTILE, words=[HOSTILE], stages={HOSTILE: 3.0})
    page = html.runs_page(msgspec.structs.replace(found, runs=[row], stages=[HOSTILE]))
    assert page.count("<script>") == 1
    assert "<img" not in page


def test_the_chart_has_a_bar_for_each_run(folder: Path) -> None:
    found = table(folder)
    chart = charts.runs_chart(found.runs, dict.fromkeys(found.stages, ""))
    assert [hover.title.split(":")[0] for hover in chart.hovers] == ["1", "2", "3"]
    assert "update_weights: 6." in chart.hovers[1].title
    assert [tick.text for tick in chart.x_ticks] == ["1", "2", "3"]
    assert chart.rate.count("L") == 2
