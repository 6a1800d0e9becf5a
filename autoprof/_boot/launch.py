"""Rank of this process in the launch that started it.

A launch is one call of `mpirun`, `srun` or torchrun, which starts all ranks. On every node, the ranks derive the same
name from the launcher's variables. That name is the run's id. If the launcher is itself a process of the run
(torchrun), the ranks inherit the run's id and need no name. Only ranks of a launch import this module.
"""

import os

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from autoprof._boot import Command

LAUNCH_RUN_ID = "AUTOPROF_RUN_ID"
# This rank and the number of ranks, for example `3/8`.
LAUNCH_RANK = "AUTOPROF_OWN_RANK"
# `NAME:NUMBER`: the name of the launch, and a random number that identifies this program. A launch may start several
# programs in each rank.
LAUNCH = "AUTOPROF_LAUNCH"
# Prefix of launch names that are not unique. They are made from an address and a port, which a later launch may reuse.
LAUNCH_AGAIN = "ranks-"

_LOOPBACK = ("localhost", "127.", "::1", "[::1]")


def note_launch(environ: "MutableMapping[str, str]", command: "Command", starts: bool) -> None:
    """Write the rank of this process into the environment. If `starts` is True, also write its launch id and run id.

    Ray's workers get no rank here, although they inherit the variables of the `srun` that started Ray.

    Args:
        environ: The environment.
        command: The command line of this process.
        starts: True if this process starts a run.
    """
    for name in (LAUNCH_RANK, LAUNCH) if starts or command.ray_worker else (LAUNCH_RANK,):
        environ.pop(name, None)
    launch = None if command.ray_worker else find_launch(environ, command.name)
    if launch is None:
        return
    name, rank, ranks = launch
    if name.startswith(LAUNCH_AGAIN) and command.launcher:
        return
    environ[LAUNCH_RANK] = f"{rank}/{ranks}"
    if starts:
        environ[LAUNCH] = f"{name}:{os.urandom(4).hex()}"
        environ.setdefault(LAUNCH_RUN_ID, name)


def find_launch(environ: "Mapping[str, str]", program: str) -> "tuple[str, int, int] | None":
    """Return the name of the launch, the rank of this process and the number of ranks; None if there is only one rank.

    Args:
        environ: The environment.
        program: Name of the program. The ranks of one launch may run several programs, one after the other or only in
            some ranks. So the name of the program is a part of the launch's name.
    """
    # Open MPI comes before Slurm: `mpirun` starts its daemons on other nodes by a Slurm step, whose ranks are the
    # daemons.
    for read in (_open_mpi, _slurm, _torch):
        launch = read(environ)
        if launch is not None and launch[3] > 1:
            kind, facts, rank, ranks = launch
            return f"{kind}-{_digest([*facts, program])}", rank, ranks
    return None


def _open_mpi(environ: "Mapping[str, str]") -> "tuple[str, list[str], int, int] | None":
    rank, ranks = _number(environ, "OMPI_COMM_WORLD_RANK"), _number(environ, "OMPI_COMM_WORLD_SIZE")
    # A random number of `mpirun`, by which its ranks recognize each other on the network.
    job = environ.get("OMPI_MCA_orte_precondition_transports")
    if rank is None or ranks is None or not (job or environ.get("PMIX_NAMESPACE")):
        return None
    # The namespace is made from a host name and a process id.
    return ("mpi", [job], rank, ranks) if job else (LAUNCH_AGAIN[:-1], [environ["PMIX_NAMESPACE"]], rank, ranks)


def _slurm(environ: "Mapping[str, str]") -> "tuple[str, list[str], int, int] | None":
    """Return the kind of launch, facts that identify the Slurm step, the rank, and the number of ranks.

    Return None outside of a Slurm step. Only `srun` sets the number of a step's tasks (`SLURM_STEP_NUM_TASKS`). Batch
    scripts and the shell of `salloc` lack this variable.
    """
    rank, ranks = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    if rank is None or ranks is None or not job or not step:
        return None
    facts = [environ.get("SLURM_CLUSTER_NAME", ""), environ.get("SLURM_RESTART_COUNT", "0")]
    return f"slurm-{_tidy(job)}.{_tidy(step)}", [*facts, job, step], rank, ranks


def _torch(environ: "Mapping[str, str]") -> "tuple[str, list[str], int, int] | None":
    rank, ranks = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if rank is None or ranks is None or not address or not port:
        return None
    facts = [address, port, environ.get("TORCHELASTIC_RUN_ID", ""), environ.get("TORCHELASTIC_RESTART_COUNT", "")]
    if address.startswith(_LOOPBACK):
        facts += _network()
    return LAUNCH_AGAIN[:-1], facts, rank, ranks


def _network() -> "list[str]":
    """Return texts that identify a loopback device: the boot id and the network namespace, or only the host name."""
    from autoprof.base import seam

    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return [file.read().strip(), str(os.stat("/proc/self/ns/net").st_ino)]
    except OSError as error:
        seam.pass_on(error)
        return [os.uname().nodename]


def _number(environ: "Mapping[str, str]", name: str) -> "int | None":
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else None


def _tidy(text: str) -> str:
    return "".join(letter for letter in text if letter.isalnum())[:20]


def _digest(facts: "list[str]") -> str:
    import hashlib

    return hashlib.sha256("\0".join(facts).encode(errors="replace")).hexdigest()[:8]
