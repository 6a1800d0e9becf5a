"""Identity of this machine, process and rank."""

from __future__ import annotations

import pwd
import re
import stat
import sys

from autoprof.base import files, interrupts
from autoprof.base.originals import io, os

# The longest part of a file name: role, stage and host stand in one.
LONGEST_NAME = 60


def host_name(name: str) -> str:
    """Return a host's name as it stands in names of files."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)[:LONGEST_NAME] or "localhost"


HOST = host_name(os.uname().nodename)


def machine() -> str:
    """Return an id of this machine since its boot, the same in all its containers; its name where there is none."""
    try:
        with io.open("/proc/sys/kernel/random/boot_id", encoding="utf-8", opener=files.descriptor) as file:
            return file.read().strip()
    except OSError as error:
        interrupts.pass_on(error)
        return os.uname().nodename


def user_name(uid: int) -> str:
    """Return the name of a user of this host, or the number if the user has no name here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError) as error:
        interrupts.pass_on(error)
        return str(uid)


def start_ticks(pid: int) -> int | None:
    """Return when a process of this host began, in ticks since the host did; None where it does not run (any more)."""
    try:
        with io.open(f"/proc/{pid}/stat", "rb", opener=files.descriptor) as file:
            # The name of the program stands in brackets and may hold anything.
            fields = file.read().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, ValueError, IndexError) as error:
        interrupts.pass_on(error)
        return None


def pid_namespace() -> int:
    """Return the id of the namespace of this process's pid, 0 if it is unknown.

    Containers may share a host name and have equal pids.
    """
    found = files.status("/proc/self/ns/pid")
    return 0 if found is None else found.st_ino


def own_stderr() -> str:
    """Return the file that stderr is, if its name has the number of this process, as those of Ray's workers have."""
    try:
        path = os.readlink("/proc/self/fd/2")
        is_file = stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        interrupts.pass_on(error)
        return ""
    return path if re.search(rf"\b{os.getpid()}\b", os.path.basename(path)) and is_file else ""


def own_rank() -> int:
    """Return the global rank of this process, as torchrun and other launchers set it; 0 where there is but one.

    Lightning starts ranks without the variable: there torch.distributed knows, if somebody has set it up.
    """
    if rank := _variable("RANK"):
        return int(rank)
    distributed = sys.modules.get("torch.distributed")
    set_up = getattr(distributed, "is_initialized", None)
    return int(getattr(distributed, "get_rank")() if set_up is not None and set_up() else _launched()[0])  # noqa: B009


def first_rank() -> bool:
    """Return whether this process is the first rank, or the only one: it speaks for all."""
    return (_variable("RANK") or _launched()[0]) == "0"


def ranks() -> int:
    """Return how many ranks a launcher such as torchrun has started, each with the trainer in it."""
    return int(_variable("WORLD_SIZE") or _launched()[1])


def _variable(name: str) -> str:
    """Return a variable of the environment, or an empty text."""
    return os.environ.get(name, "")


def _launched() -> tuple[str, str]:
    """Return the rank and the number of ranks that the boot has found (`_boot/command.py`)."""
    rank, _, count = _variable("AUTOPROF_OWN_RANK").partition("/")
    return (rank, count) if rank.isdecimal() and count.isdecimal() else ("0", "1")
