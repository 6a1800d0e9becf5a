"""Launch of several ranks, one of which this process is, by the variables that its launcher sets.

All ranks of a launch find the same name for it, without a word to each other, on whatever node. It is the name of their
run. Ranks whose launcher is a process of the run (torchrun) inherit the run's name, and need none.
"""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from autoprof._boot.command import Command

RUN_ID = "AUTOPROF_RUN_ID"
# The number of this rank and the count of all, as `3/8`.
RANK = "AUTOPROF_OWN_RANK"
# The launch, a colon, and a number that only this program of the rank has: the launch may start several in each rank.
LAUNCH = "AUTOPROF_LAUNCH"
# How the names of launches begin that another launch may have again, later: nothing but an address and a port says
# which it is.
AGAIN = "ranks-"

_LOOPBACK = ("localhost", "127.", "::1", "[::1]")


def note(environ: "MutableMapping[str, str]", command: "Command", starts: bool) -> None:
    """Leave this process's rank in the environment and, where it starts a run, the launch, which names the run.

    Ray's workers are ranks of what Ray says alone, though a raylet inherits the variables of its `srun`.
    """
    for name in (RANK, LAUNCH) if starts or command.ray_worker else (RANK,):
        environ.pop(name, None)
    launch = None if command.ray_worker else found(environ, command.name)
    if launch is None:
        return
    name, rank, ranks = launch
    if name.startswith(AGAIN) and command.launcher:
        return
    environ[RANK] = f"{rank}/{ranks}"
    if starts:
        environ[LAUNCH] = f"{name}:{os.urandom(4).hex()}"
        environ.setdefault(RUN_ID, name)


def found(environ: "Mapping[str, str]", program: str) -> "tuple[str, int, int] | None":
    """Return the name of the launch, the rank of this process and how many there are; None where it is the only one.

    Args:
        environ: The environment.
        program: What the rank runs: ranks may each run one program after the other, or one of them alone another.
    """
    # `mpirun` starts its daemons on other nodes by a step of Slurm's, the ranks of which are not those of the program.
    for look in (_open_mpi, _slurm, _torch):
        launch = look(environ)
        if launch is not None and launch[3] > 1:
            kind, facts, rank, ranks = launch
            return f"{kind}-{_digest([*facts, program])}", rank, ranks
    return None


def _open_mpi(environ: "Mapping[str, str]") -> "tuple[str, list[str], int, int] | None":
    rank, ranks = _number(environ, "OMPI_COMM_WORLD_RANK"), _number(environ, "OMPI_COMM_WORLD_SIZE")
    # A random number of `mpirun`'s, by which ranks know each other on the network.
    job = environ.get("OMPI_MCA_orte_precondition_transports")
    if rank is None or ranks is None or not (job or environ.get("PMIX_NAMESPACE")):
        return None
    # The namespace is made from a host name and a process id.
    return ("mpi", [job], rank, ranks) if job else (AGAIN[:-1], [environ["PMIX_NAMESPACE"]], rank, ranks)


def _slurm(environ: "Mapping[str, str]") -> "tuple[str, list[str], int, int] | None":
    """Only `srun` sets the number of tasks of a step: a batch script and a shell of `salloc` have no such variable."""
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
    return AGAIN[:-1], facts, rank, ranks


def _network() -> "list[str]":
    """Return what tells one loopback device from another: the machine, since its boot, and the network namespace."""
    from autoprof.base import interrupts

    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return [file.read().strip(), str(os.stat("/proc/self/ns/net").st_ino)]
    except OSError as error:
        interrupts.pass_on(error)
        return [os.uname().nodename]


def _number(environ: "Mapping[str, str]", name: str) -> "int | None":
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else None


def _tidy(text: str) -> str:
    return "".join(letter for letter in text if letter.isalnum())[:20]


def _digest(facts: "list[str]") -> str:
    import hashlib

    return hashlib.sha256("\0".join(facts).encode(errors="replace")).hexdigest()[:8]
