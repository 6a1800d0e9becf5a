"""Own loops: their reports equal their own clocks, healthy ones have no finding, and planted causes are found first."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import wrapt

from autoprof.report.model import Finding
from autoprof.rundir import runs
from tests.support import helpers, truth
from tests.support.helpers import ROOT
from tests.truth.table import HEALTHY, PLANTED, Program

PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT_S = 120
# Kinds of findings whose cost is unknown.
NO_COST = ("death", "failed_samples")


def _rows(table: list[Program]) -> list[Any]:
    return [
        pytest.param(
            row,
            id=row.name,
            marks=[pytest.mark.xfail(strict=True, raises=AssertionError, reason=row.known)] if row.known else [],
        )
        for row in table
    ]


def execute(row: Program, folder: Path) -> Path:
    """Run a program with autoprof in a folder, and return the run's directory.

    Raises:
        RuntimeError: The program failed.
        TimeoutExpired: The program did not end.
    """
    script = str(PROGRAMS / f"{row.program}.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(row.ranks)]
    command = [sys.executable, *(launcher if row.ranks > 1 else []), script, json.dumps(dict(row.options))]
    settings = {
        "AUTOPROF": "1",
        "OMP_NUM_THREADS": "1",
        # The launcher imports autoprof's dependencies before `site` has set all paths.
        "PYTHONPATH": f"{ROOT}:{PROGRAMS}:{Path(wrapt.__file__).parent.parent}",
    }
    if row.program == "rollouts":
        settings["AUTOPROF_RECIPES"] = str(PROGRAMS / "rollouts.toml")
    done = helpers.run(command, cwd=folder, timeout_s=TIMEOUT_S, **settings | dict(row.settings))
    if bool(done.returncode) != (row.kind == "death"):
        raise RuntimeError(f"status {done.returncode}\n{done.stderr[-3000:]}")
    (run,) = runs.runs(folder / "autoprof_runs")
    return run.path


def read(folder: Path) -> tuple[dict[int, dict[str, float]], dict[int, int], float]:
    """Return the seconds of each stage and the tokens by step, by the program's own clock, and the planted seconds."""
    stages: dict[int, dict[str, float]] = {}
    tokens: dict[int, int] = defaultdict(int)
    for line in map(json.loads, (folder / "truth.jsonl").read_text().splitlines()):
        if line["rank"] == 0:
            stages[line["step"]] = truth.by_stage(line["spans"])
            tokens[line["step"]] += line.get("tokens", 0)
    planted = folder / "planted.json"
    return stages, tokens, json.loads(planted.read_text())["seconds"] if planted.exists() else 0.0


def differences(row: Program, folder: Path) -> tuple[list[str], float, Finding | None]:
    """Run a program. Return the errors of its report, the planted seconds and the first finding."""
    folder.mkdir()
    report = truth.figures(execute(row, folder))
    stages, tokens, planted_s = read(folder)
    planted_s = planted_s or row.options.get("plant", {}).get("seconds", 0.0)
    if row.kind in NO_COST:
        planted_s = 0.0
    wrong = truth.finding_differences(report, row.kind, row.step, row.words, planted_s)
    if row.kind != "death":
        wrong += truth.stage_differences(report, stages)
        counted = {each.number: each.response_tokens or 0 for each in report.steps}
        wrong += [f"tokens {counted} instead of {dict(tokens)}"] if counted != tokens else []
    return wrong, planted_s, report.findings[0] if report.findings else None


@pytest.mark.truth
@pytest.mark.needs("torch")
@pytest.mark.parametrize("row", _rows([*HEALTHY, *PLANTED]))
def test_the_report_is_true(
    row: Program, tmp_path: Path, request: pytest.FixtureRequest, record_property: truth.Record
) -> None:
    if not row.quick:
        request.getfixturevalue("thorough")
    expected = row.kind + (f" of step {row.step}" if row.step else "") or "no finding"
    try:
        wrong, planted_s, first = differences(row, tmp_path / "first")
        if wrong and not row.known:
            # Another program may have stopped this one. The second run must be right.
            wrong, planted_s, first = differences(row, tmp_path / "second")
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        truth.crash(record_property, row.name, expected, error)
        raise
    truth.row(
        record_property,
        row.name,
        expected,
        wrong,
        got=first.text if first else "",
        planted_s=planted_s,
        reported_s=first.seconds if first else 0.0,
        known=row.known,
    )
