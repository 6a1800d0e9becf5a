"""Name of a launch, and number of a rank, from the variables of launchers or from torch.distributed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from autoprof._boot import Command, launch
from autoprof.base import identity
from tests.support.launchers import BATCH, by_hand, mpirun, srun

TRAIN = Command(["python", "train.py"])
RAY_WORKER = Command(["python", "/site/ray/_private/workers/default_worker.py", "--node-ip-address=::1"])
TORCHRUN = Command(["python", "/usr/bin/torchrun", "--nnodes=2", "train.py"])


def name(variables: dict[str, str], program: str = "train.py") -> str:
    found = launch.find_launch(variables, program)
    assert found is not None
    return found[0]


@pytest.mark.parametrize("kind", [srun, mpirun, lambda rank, ranks: by_hand(rank, ranks, 29500)])
def test_all_ranks_find_the_same_name_and_their_number(kind) -> None:
    found = [launch.find_launch(kind(rank, 3), "train.py") for rank in range(3)]
    assert [launched[1:] for launched in found] == [(0, 3), (1, 3), (2, 3)]
    assert len({launched[0] for launched in found}) == 1


def test_slurms_job_and_step_are_in_the_name() -> None:
    assert name(srun(1, 2, job=4711, step=3)).startswith("slurm-4711.3-")


@pytest.mark.parametrize(
    "other",
    [
        srun(0, 2, job=13),
        srun(0, 2, step=1),
        srun(0, 2) | {"SLURM_RESTART_COUNT": "1"},
        srun(0, 2) | {"SLURM_CLUSTER_NAME": "other"},
    ],
    ids=["job", "step", "requeued", "cluster"],
)
def test_another_job_step_or_start_has_another_name(other: dict[str, str]) -> None:
    assert name(other) != name(srun(0, 2))


def test_another_mpirun_port_or_attempt_of_torchrun_has_another_name() -> None:
    assert name(mpirun(0, 2, job="d18d780aae960fed-eec27e2d16ac97b7")) != name(mpirun(0, 2))
    assert name(by_hand(0, 2, 1)) != name(by_hand(0, 2, 2))
    again = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert name(by_hand(0, 2, 1) | again) != name(by_hand(0, 2, 1) | again | {"TORCHELASTIC_RESTART_COUNT": "0"})


def test_the_loopback_addresses_of_two_hosts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    here = name(by_hand(0, 2, 29500))
    far = name(by_hand(0, 2, 29500) | {"MASTER_ADDR": "node1"})
    monkeypatch.setattr(launch, "_network", lambda: ["another"])
    assert name(by_hand(0, 2, 29500)) != here
    assert name(by_hand(0, 2, 29500) | {"MASTER_ADDR": "node1"}) == far


@pytest.mark.parametrize(
    "variables",
    [
        {},
        BATCH,
        srun(0, 1),
        mpirun(0, 1),
        {"RANK": "0", "WORLD_SIZE": "2"},
        by_hand(0, 2, 1) | {"RANK": "first"},
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
    ],
    ids=["none", "batch script", "one task", "one rank", "no address", "no number", "no job"],
)
def test_a_program_without_several_ranks_has_no_name(variables: dict[str, str]) -> None:
    assert launch.find_launch(variables, "train.py") is None


def test_mpirun_takes_precedence_over_the_step_of_its_daemon() -> None:
    assert launch.find_launch(srun(0, 2) | mpirun(5, 8), "train.py") == launch.find_launch(mpirun(5, 8), "train.py")


def test_another_program_of_rank_0_has_another_name() -> None:
    assert name(srun(0, 2), "prepare.py") != name(srun(0, 2), "train.py")


def test_a_rank_that_starts_a_run_names_it_and_its_children_keep_the_name() -> None:
    environ = srun(1, 2)
    launch.note_launch(environ, TRAIN, starts=True)
    assert environ[launch.LAUNCH_RANK] == "1/2"
    assert environ[launch.LAUNCH].startswith(f"{environ[launch.LAUNCH_RUN_ID]}:")
    child = dict(environ)
    launch.note_launch(child, Command(["python", "-c", "spawn_main()"]), starts=False)
    assert child == environ


def test_a_given_run_id_is_kept() -> None:
    environ = srun(1, 2) | {launch.LAUNCH_RUN_ID: "mine"}
    launch.note_launch(environ, TRAIN, starts=True)
    assert environ[launch.LAUNCH_RUN_ID] == "mine"
    assert environ[launch.LAUNCH].startswith("slurm-12.0-")


def test_rays_workers_are_not_ranks_of_the_raylets_launcher() -> None:
    environ = srun(1, 2) | {launch.LAUNCH_RANK: "1/2", launch.LAUNCH: "x:y", launch.LAUNCH_RUN_ID: "of-the-driver"}
    launch.note_launch(environ, RAY_WORKER, starts=False)
    assert environ == srun(1, 2) | {launch.LAUNCH_RUN_ID: "of-the-driver"}


def test_agents_of_torchrun_are_named_by_slurm_but_not_by_an_address() -> None:
    environ = by_hand(0, 2, 29500)
    launch.note_launch(environ, TORCHRUN, starts=True)
    assert environ == by_hand(0, 2, 29500)
    environ = srun(0, 2)
    launch.note_launch(environ, TORCHRUN, starts=True)
    assert environ[launch.LAUNCH_RUN_ID].startswith("slurm-12.0-")


@pytest.mark.parametrize(
    ("variable", "distributed", "rank"),
    [
        ("3", {"is_initialized": lambda: True, "get_rank": lambda: 5}, 3),
        (None, {"is_initialized": lambda: True, "get_rank": lambda: 5}, 5),
        (None, {"is_initialized": lambda: False}, 0),
        (None, {}, 0),  # torch was built without it, or is being imported
    ],
)
def test_the_launchers_rank_counts_and_else_that_of_torch(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, distributed: dict[str, object], rank: int
) -> None:
    if variable is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", variable)
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(**distributed))  # type: ignore[arg-type]
    assert identity.own_rank() == rank


def test_without_torch_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    assert identity.own_rank() == 0
