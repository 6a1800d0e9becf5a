"""Generator of large runs, tested with a small run: commands read it like a real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autoprof.rundir import file_names, runs
from bench import processes
from bench.large_runs import RUN_ID
from bench.processes import MAIN
from tests.support.helpers import autoprof, spans

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


def test_each_rank_has_five_stages_in_each_step(made: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = made
    stages = [span for span in spans(folder) if span["kind"] == "stage"]
    of_rank = [span for span in stages if span["rank"] == 3]
    # The first attempt is killed in update_actor of step 6; the second begins with step 5.
    assert [span["step"] for span in of_rank].count(12) == 5
    assert [span["step"] for span in of_rank].count(5) == 10
    assert [span["step"] for span in of_rank].count(6) == 8
    assert {span["rank"] for span in stages} == {0, 1, 2, 3}


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
