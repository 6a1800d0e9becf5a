"""`make gpu DEVICE=cpu`, called once in a copy of the tree without git; all tests read its output files."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import page
from bench.gpu.rows import ROWS
from tests.support import helpers
from tests.support.helpers import ROOT

TREE = ("Makefile", "autoprof", "bench", "recipes", "sitecustomize")
# Rows that run without --thorough. With it, all rows run.
QUICK = ("machine", "trainer", "memory", "two_processes")


@dataclass(frozen=True)
class Ran:
    """Exit status, output and files of the command, and the names of the rows."""

    status: int
    printed: str
    folder: Path
    out: Path
    rows: tuple[str, ...]

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.out / "gpu.json").read_text())

    def facts(self, name: str) -> dict[str, tuple[str, str]]:
        """Return state and figure of each fact of a row."""
        (row,) = [row for row in self.results["rows"] if row["name"] == name]
        return {fact["text"]: (fact["state"], fact["figure"]) for fact in row["facts"]}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Ran:
    rows = tuple(row.name for row in ROWS) if request.config.getoption("thorough") else QUICK
    folder = tmp_path_factory.mktemp("tree")
    for name in TREE:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, folder / name)
    out = tmp_path_factory.mktemp("out")
    command = ["make", "gpu", "DEVICE=cpu", f"PYTHON={sys.executable}", f"OUT={out}"]
    command += [f"ROWS={' '.join(rows)}"] if rows == QUICK else []
    done = helpers.run(command, cwd=folder, timeout_s=1800)
    return Ran(done.returncode, done.stdout + done.stderr, folder, out, rows)


def test_nothing_fails(ran: Ran) -> None:
    wrong = [(row["name"], row["reason"]) for row in ran.results["rows"] if row["state"] == "fail"]
    assert wrong == []
    assert ran.status == 0, ran.printed


def test_every_row_has_a_result_and_skipped_rows_have_a_reason(ran: Ran) -> None:
    rows = ran.results["rows"]
    assert [row["name"] for row in rows] == list(ran.rows)
    assert [row["name"] for row in rows if row["state"] == "skipped" and not row["reason"]] == []
    passed = {row["name"] for row in rows if row["state"] == "pass"}
    of_cpu = {"machine", "trainer", "sums", "contents", "whole_steps", "mixed", "compiled", "memory", "causes"}
    assert passed >= (of_cpu | {"two_processes", "fsdp", "cost"}) & set(ran.rows)


def test_training_is_the_same_with_autoprof(ran: Ran) -> None:
    state, figure = ran.facts("trainer")["losses and weights are the same without autoprof"]
    assert state == "pass"
    assert figure.startswith("weights ")


def test_facts_about_kernels_are_skipped_on_a_cpu(ran: Ran) -> None:
    state, figure = ran.facts("trainer")["the backward pass launched kernels"]
    assert (state, figure) == ("skipped", "the CPU has no kernels")


def test_the_table_is_written_from_the_json(ran: Ran) -> None:
    assert (ran.out / "GPU.md").read_text() == page.render(ran.results)
    assert ran.results["finished"]


def test_it_prints_progress_and_writes_logs_and_the_report(ran: Ran) -> None:
    assert "== trainer: transformers' Trainer" in ran.printed
    logs = {str(path.relative_to(ran.out)) for path in (ran.out / "logs").iterdir()}
    assert logs == {log for row in ran.results["rows"] for log in row["logs"]}
    assert "<html" in (ran.out / "report.html").read_text()[:1000]


def test_the_tree_stays_as_it_was(ran: Ran) -> None:
    """The page in bench/ comes from a GPU run, so a CPU run must not write it, nor any other file of the tree."""
    assert {path.name for path in ran.folder.iterdir()} == set(TREE)
    assert (ran.folder / "bench" / "GPU.md").exists() == (ROOT / "bench" / "GPU.md").exists()
