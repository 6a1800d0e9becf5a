"""Lightning under both of its names: two ranks that Lightning starts, and both kinds of optimisation."""

from __future__ import annotations

import sys

import pytest

from autoprof.report.model import OWN
from tests.support import trainer_runs, truth
from tests.support.trainer_runs import SCRIPTS
from tests.support.trl_runs import Ran

SCRIPT = SCRIPTS / "lightning" / "fit.py"


def fit(tmp_path_factory: pytest.TempPathFactory, kind: str, **variables: str) -> Ran:
    folder = tmp_path_factory.mktemp(kind)
    environment = trainer_runs.environment(trainer_runs.packages_of("lightning"), **variables)
    return trainer_runs.run([sys.executable, str(SCRIPT), kind], folder, environment)


@pytest.fixture(scope="module")
def automatic(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run `lightning` on two ranks: two steps of two batches each, and two more after a resumption."""
    return fit(tmp_path_factory, "automatic", AUTOPROF="1", AUTOPROF_STEPS="2,3", AUTOPROF_RANKS="all")


@pytest.fixture(scope="module")
def manual(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run `pytorch_lightning` on one rank: three steps with two optimizers."""
    return fit(tmp_path_factory, "manual", AUTOPROF="1")


@pytest.mark.truth
def test_stages_take_the_seconds_of_the_programs_own_clock(
    automatic: Ran, manual: Ran, record_property: truth.Record
) -> None:
    batches = automatic.said["took"]
    both = [("training_step", automatic, [sum(batches[first : first + 2]) for first in range(0, len(batches), 2)])]
    # In manual optimisation, the backward pass and the optimizers are parts of the training step.
    both.append(("training_step backward optimizer_step", manual, manual.said["took"]))
    wrong = []
    for names, ran, took in both:
        rows = truth.figures(ran.run).steps
        for row, seconds in zip(rows, took, strict=True):
            got = sum(row.stages.get(name, 0.0) for name in names.split())
            wrong += truth.second_differences(f"step {row.number} {names}", got, seconds, row.stages.get(OWN, 0.0))
    # A busy machine may stop the process between both clocks, so one step may differ.
    truth.row(record_property, "Lightning", "the program's own clock", wrong if len(wrong) > 1 else [])


@pytest.mark.truth
def test_healthy_trainings_have_no_finding(automatic: Ran, manual: Ran, record_property: truth.Record) -> None:
    wrong = [text for ran in (automatic, manual) for text in truth.unconfirmed(truth.figures(ran.run))]
    truth.row(record_property, "Lightning", "no finding", wrong)


def test_accumulated_batches_are_one_step_on_each_rank(automatic: Ran) -> None:
    batches = {f"trainer.{stage}{number}" for stage in ("training_step", "backward") for number in ("", ".2")}
    step = batches | {"trainer.optimizer_step"}
    assert automatic.steps() == [2, 3]
    for number, names in {2: step | {"trainer.save_checkpoint"}, 3: step}.items():
        expected = {f"{name}@{rank}" for name in names for rank in (0, 1)}
        assert automatic.captures(number) == dict.fromkeys(expected, "complete")


def test_steps_have_the_trainers_numbers_even_after_a_resumption(automatic: Ran) -> None:
    assert automatic.said["global_step"] == 4
    for rank in (0, 1):
        steps = [span["step"] for span in automatic.spans("step") if span["rank"] == rank]
        assert steps == [1, 2, 3, 4], f"rank {rank}"


def test_forward_backward_and_optimizer_have_separate_traces(automatic: Ran) -> None:
    kinds = {stage: automatic.operators(2, f"trainer.{stage}") for stage in ("training_step", "backward")}
    optimizer = automatic.operators(2, "trainer.optimizer_step")
    assert any("mse_loss" in name for name in kinds["training_step"])
    assert not any("Backward" in name for name in kinds["training_step"])
    assert any("Backward" in name for name in kinds["backward"])
    assert optimizer["aten::addcdiv_"] == 2  # AdamW, for weight and bias
    assert not any("mse_loss" in name or "Backward" in name for name in optimizer)


def test_validation_and_checkpoint_belong_to_the_step_before_them(automatic: Ran) -> None:
    first = [span for span in automatic.spans() if span["rank"] == 0]
    # Lightning's check of the validation before the training belongs to no step.
    assert [span["step"] for span in first if span["name"] == "validate"] == [None, 2, None, 4]
    assert [span["step"] for span in first if span["name"] == "save_checkpoint"] == [2, 4]
    for each in (span for span in first if span["name"] == "save_checkpoint"):
        (before,) = [span for span in first if span["name"] == "validate" and span["step"] == each["step"]]
        assert before["end_ns"] <= each["start_ns"]


def test_both_ranks_are_in_one_run(automatic: Ran) -> None:
    assert len(automatic.processes()) == 2
    assert [process["errors"] for process in automatic.processes()] == [{}, {}]


def test_a_batch_of_manual_optimisation_is_a_step(manual: Ran) -> None:
    assert manual.said["global_step"] == 4  # steps of both optimizers; the second steps with every other batch
    assert [span["step"] for span in manual.spans("step")] == [1, 2, 3]
    assert manual.steps() == [2]
    assert manual.names(2) == {"trainer.training_step"}
    assert any("Backward" in name for name in manual.operators(2, "trainer.training_step"))


def test_the_timeline_separates_the_parts_of_manual_optimisation(manual: Ran) -> None:
    inside = [span for span in manual.spans() if span["step"] == 2 and span["name"] != "training_step"]
    (whole,) = [span for span in manual.spans() if span["step"] == 2 and span["name"] == "training_step"]
    assert [span["name"] for span in inside] == ["backward", "optimizer_step", "optimizer_step"]
    assert all(whole["start_ns"] <= span["start_ns"] <= span["end_ns"] <= whole["end_ns"] for span in inside)


def test_losses_are_the_same_without_autoprof(manual: Ran, tmp_path_factory: pytest.TempPathFactory) -> None:
    without = fit(tmp_path_factory, "manual")
    assert without.said["autoprof"] == []
    assert list(without.folder.glob("autoprof_runs")) == []
    assert manual.said["autoprof"] == ["autoprof"]
    assert without.said["losses"] == manual.said["losses"] != []


def test_both_names_have_the_same_hooks() -> None:
    by_name = {}
    for name, prefix in {"lightning": "lightning.pytorch.", "pytorch_lightning": "pytorch_lightning."}.items():
        text = (trainer_runs.ROOT / "recipes" / f"{name}.toml").read_text()
        by_name[name] = text[text.index("versions") :].replace(prefix, "")
    assert by_name["lightning"] == by_name["pytorch_lightning"]
