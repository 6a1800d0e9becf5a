"""Environment variables that launchers set for ranks, and functions that start ranks with them.

Recorded from `srun` of Slurm 22.05.8 (Debian 12) and `mpirun` of Open MPI 4.1.4; variables that don't relate ranks to
each other are left out. Slurm sets `SLURM_RESTART_COUNT` from a job's second start on. All components of a
heterogeneous step have the id of the job's first component, and their ranks are numbered consecutively.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import wrapt

from tests.support import small_trainer
from tests.support.helpers import clean_environment

# Variables of a batch script and of a shell of `salloc`, which are part of a job but of no step.
BATCH = {
    "SLURM_CLUSTER_NAME": "tiny",
    "SLURM_JOBID": "12",
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASK_PID": "20591",
}


def srun(rank: int, ranks: int, *, job: int = 12, step: int = 0) -> dict[str, str]:
    """Return the variables of a task of `srun`."""
    return BATCH | {
        "SLURM_JOBID": str(job),
        "SLURM_JOB_ID": str(job),
        "SLURM_LOCALID": str(rank),
        "SLURM_NPROCS": str(ranks),
        "SLURM_NTASKS": str(ranks),
        "SLURM_PROCID": str(rank),
        "SLURM_STEPID": str(step),
        "SLURM_STEP_ID": str(step),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_STEP_TASKS_PER_NODE": str(ranks),
        "SLURM_TASK_PID": str(20610 + rank),
    }


def mpirun(rank: int, ranks: int, *, job: str = "85931204b7a1f1fa-0c7c908d316f323a") -> dict[str, str]:
    """Return the variables of a rank of `mpirun`."""
    return {
        "OMPI_APP_CTX_NUM_PROCS": str(ranks),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(ranks),
        "OMPI_MCA_ess_base_jobid": "1056178177",
        "OMPI_MCA_orte_precondition_transports": job,
        "PMIX_ID": f"1056178177.{rank}",
        "PMIX_NAMESPACE": "1056178177",
        "PMIX_RANK": str(rank),
    }


def by_hand(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torch's `env://` reads, which scripts and Kubernetes operators set."""
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)} | address


# Variables to remove, so that no test is a rank of the launcher that started pytest.
NOT_SET = {*srun(0, 2), *mpirun(0, 2), *by_hand(0, 2, 1), "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"}


def prepare(folder: Path, script: str, trainer: str = small_trainer.PLAIN) -> None:
    """Write a script, and a trainer that it can import, into a folder."""
    small_trainer.write(folder, trainer)
    (folder / "train.py").write_text(script)


def environment(folder: Path, *, captured: bool = False, **variables: str) -> dict[str, str]:
    """Return the environment of processes that import the trainer in `folder`.

    If `captured`, they capture step 2 on all ranks, otherwise nothing.
    """
    settings = {
        "AUTOPROF": "1",
        "AUTOPROF_LOG": "warning",
        "AUTOPROF_RANKS": "all",
        "AUTOPROF_RECIPES": str(folder / "lib" / "small.toml"),
        # A capture imports torch, which takes longer than the rest of the test.
        "AUTOPROF_STEPS": "2" if captured else "",
        "OMP_NUM_THREADS": "1",
        # A launcher imports autoprof's dependencies before `site` has set all paths.
        "PYTHONPATH": f"{folder / 'lib'}:{Path(wrapt.__file__).parent.parent}",
    }
    kept = {name: value for name, value in clean_environment().items() if name not in NOT_SET}
    return kept | settings | variables


def together(
    folder: Path, ranks: Sequence[Mapping[str, str]], command: Sequence[str] = ("train.py",), *, captured: bool = False
) -> list[subprocess.CompletedProcess[str]]:
    """Start one Python process for each set of variables, all at the same time, and wait for all."""
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environment(folder, captured=captured, **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for variables in ranks
    ]
    return list(_ended(started))


def _ended(started: list[subprocess.Popen[str]]) -> Iterator[subprocess.CompletedProcess[str]]:
    try:
        for process in started:
            output, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-3000:]
            yield subprocess.CompletedProcess(process.args, 0, output, errors)
    finally:
        for process in started:
            process.kill()
