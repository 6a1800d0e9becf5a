"""Command line of this interpreter, and its rank in the launch that started it.

All ranks of a launch derive the same name for it from the launcher's variables, on every node. That name is the run's
id. Ranks whose launcher is itself a process of the run (torchrun) inherit the run's id and need no name.
"""

import os
import sys

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence


# Scripts and modules that are no business of ours, by how their command line begins or what their path contains.
# Ray starts each worker's interpreter twice in one pid; only the second start (default_worker.py) has the environment
# of the job (Ray 2.60, ray/_private/workers/setup_worker.py).
_FOREIGN_PROGRAMS = (
    *("pip", "pip3", "pipx", "uv", "conda", "mamba", "setup.py", "autoprof", "ray", "nsys"),
    *("cython", "cythonize", "cmake", "ninja", "meson"),
)
_FOREIGN_PATHS = (
    "/ray/dashboard/",
    "/ray/autoscaler/",
    "/ray/_private/log_monitor.py",
    "/ray/_private/runtime_env/",
    "/ray/_private/workers/setup_worker.py",
    "/torch/_inductor/compile_worker/",
)
_FOREIGN_MODULES = ("pip", "ensurepip", "venv", "virtualenv", "build", "autoprof", "ray.scripts.scripts")
_FOREIGN_TEXTS = (
    "multiprocessing.resource_tracker",
    "vllm.model_executor.models.registry",
)
# What starts the ranks of a run, each a process that runs the trainer, and waits for them. It imports no target.
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_RAY_WORKER = "/ray/_private/workers/default_worker.py"


class Command:
    """The command line of an interpreter (`sys.orig_argv`), read once.

    Attributes:
        kind: `-m`, `-c`, or an empty text for a script.
        what: The module, the code or the path of the script; empty where the interpreter reads stdin.
        name: The script or module, as its user calls it; empty for code.
        ray_worker: Whether this is a worker process of Ray: it belongs to a run, it never starts one.
    """

    def __init__(self, words: "Sequence[str]") -> None:
        self.kind, self.what = _runs(words)
        self.name = {"-m": self.what, "-c": ""}.get(self.kind, self.what.rpartition("/")[2])
        self.ray_worker = any(_RAY_WORKER in word for word in words[1:4])
        self._asks = any(word in words for word in ("-h", "--help", "--version"))

    @property
    def foreign(self) -> bool:
        """Whether this process is none that could ever be profiled."""
        if self.kind == "-m":
            return self.what in _FOREIGN_MODULES or self.what in _FOREIGN_TEXTS
        if self.kind == "-c":
            return any(text in self.what for text in _FOREIGN_TEXTS)
        return self.name in _FOREIGN_PROGRAMS or any(part in self.what for part in _FOREIGN_PATHS)

    @property
    def launcher(self) -> bool:
        """Whether this process starts the ranks of a run: the run is its own, and ends with it."""
        return self.name in (_LAUNCHER_MODULES if self.kind == "-m" else _LAUNCHERS)

    @property
    def program(self) -> bool:
        """Whether this is a program that may be meant to be profiled.

        Code on a command line or on stdin is not: scripts ask Python many a small thing. Nor are modules of the
        standard library, and a program that is asked for its usage.
        """
        library = self.kind == "-m" and self.what.partition(".")[0] in sys.stdlib_module_names
        return self.what != "" and self.kind != "-c" and not library and not self._asks


def _runs(words: "Sequence[str]") -> "tuple[str, str]":
    """Return what an interpreter runs: `-m` and a module, `-c` and code, or an empty text and a script."""
    arguments = iter(words[1:])
    for argument in arguments:
        if argument in ("-m", "-c"):
            return argument, next(arguments, "")
        if not argument.startswith("-"):
            return "", argument.replace(os.sep, "/")
        if argument in ("-X", "-W"):
            next(arguments, "")
    return "", ""


# The command line of this process.
THIS = Command(sys.orig_argv or getattr(sys, "argv", []))


LAUNCH_RUN_ID = "AUTOPROF_RUN_ID"
# The number of this rank and the count of all, as `3/8`.
LAUNCH_RANK = "AUTOPROF_OWN_RANK"
# The launch, a colon, and a number that only this program of the rank has: the launch may start several in each rank.
LAUNCH = "AUTOPROF_LAUNCH"
# How the names of launches begin that another launch may have again, later: nothing but an address and a port says
# which it is.
LAUNCH_AGAIN = "ranks-"

_LOOPBACK = ("localhost", "127.", "::1", "[::1]")


def note_launch(environ: "MutableMapping[str, str]", command: "Command", starts: bool) -> None:
    """Leave this process's rank in the environment and, where it starts a run, the launch, which names the run.

    Ray's workers are ranks of what Ray says alone, though a raylet inherits the variables of its `srun`.
    """
    for name in (LAUNCH_RANK, LAUNCH) if starts or command.ray_worker else (LAUNCH_RANK,):
        environ.pop(name, None)
    launch = None if command.ray_worker else found(environ, command.name)
    if launch is None:
        return
    name, rank, ranks = launch
    if name.startswith(LAUNCH_AGAIN) and command.launcher:
        return
    environ[LAUNCH_RANK] = f"{rank}/{ranks}"
    if starts:
        environ[LAUNCH] = f"{name}:{os.urandom(4).hex()}"
        environ.setdefault(LAUNCH_RUN_ID, name)


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
    return ("mpi", [job], rank, ranks) if job else (LAUNCH_AGAIN[:-1], [environ["PMIX_NAMESPACE"]], rank, ranks)


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
    return LAUNCH_AGAIN[:-1], facts, rank, ranks


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
