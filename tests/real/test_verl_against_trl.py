"""Comparison of a run of verl with a run of TRL: stages of different names are paired by kind."""

from __future__ import annotations

import json

import msgspec
import pytest

from autoprof.report.model import Comparison, ComparisonRow
from tests.support import engines, processes
from tests.support.helpers import autoprof, clean_environment
from tests.support.trl_runs import NAMES, SCRIPT, Ran
from tests.support.verl_runs import VerlRun

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def trl(thorough: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run four steps of GRPO with TRL, all captured; the first and the third have rollouts and scores."""
    folder = tmp_path_factory.mktemp("trl")
    environment = clean_environment(OMP_NUM_THREADS="1", AUTOPROF="1", AUTOPROF_STEPS="::1")
    command = [engines.python_of(NAMES[-1]), str(SCRIPT), "scored"]
    finished = processes.run(command, cwd=folder, env=environment, timeout_s=480)
    assert finished.status == 0, finished.output
    return Ran(folder, finished.output)


@pytest.fixture(scope="module")
def compared(trl: Ran, v1: VerlRun) -> Comparison:
    """Compare verl's run with TRL's by `autoprof report --against --json`."""
    ran = autoprof("report", str(v1.directory), "--against", str(trl.run), "--json", cwd=trl.folder)
    return msgspec.json.decode(json.dumps(json.loads(ran.stdout)["comparison"]), type=Comparison)


@pytest.fixture(scope="module")
def stages(compared: Comparison) -> dict[str, ComparisonRow]:
    """Return the rows of stages, by name."""
    return {row.name: row for row in compared.rows if row.kind == "stage"}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("generate", "generate | gen, generate_sequences"),
        ("log_prob", "compute_log_prob | old_log_prob"),
        # verl's update includes the optimizer step.
        ("update_actor", "update_actor, optimizer_step | update_actor"),
        ("validate", "evaluate | testing"),
    ],
)
def test_stages_of_a_kind_are_one_row(stages: dict[str, ComparisonRow], kind: str, names: str) -> None:
    row = stages[kind]
    # The report sorts them by time, which varies.
    assert [sorted(side.split(", ")) for side in row.where.split(" | ")] == [
        sorted(side.split(", ")) for side in names.split(" | ")
    ]
    assert row.a
    assert row.b
    assert not set(names.replace(" | ", ", ").split(", ")) - {kind} & set(stages)


@pytest.mark.parametrize("name", ["ref", "adv", "update_weights"])
def test_a_stage_that_trl_lacks_has_only_verls_figure(stages: dict[str, ComparisonRow], name: str) -> None:
    assert (stages[name].a, stages[name].where) == (None, "")
    assert stages[name].b


def test_operators_are_compared_if_both_runs_have_captures(compared: Comparison) -> None:
    operators = [row for row in compared.rows if row.kind == "operator"]
    places = {row.where for row in operators}
    assert places <= {"generate", "actor.compute_log_prob rank 0", "actor.update_actor rank 0"}
    # TRL generates with transformers, verl with vLLM; some operators are in both.
    assert [row.name for row in operators if row.where == "generate" and row.a and row.b]
    assert not [row.name for row in operators if row.name.startswith(("actor.", "rollout."))]
