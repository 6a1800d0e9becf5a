"""Identity of this machine, process and rank."""

from __future__ import annotations

import pwd
import re
import sys

from autoprof.base import files, seam
from autoprof.base.originals import os

# Maximum length of a part of a file name. A file name contains the role, the stage and the host.
MAX_NAME_CHARS = 60


def host_name(name: str) -> str:
    """Return a host's name in the form that file names contain."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)[:MAX_NAME_CHARS] or "localhost"


HOST = host_name(os.uname().nodename)


def machine() -> str:
    """Return the boot id of this machine, which all its containers share, or its host name if there is no boot id."""
    return files.text("/proc/sys/kernel/random/boot_id").strip() or os.uname().nodename


def user_name(uid: int) -> str:
    """Return the name of a user, or `uid` as text if the user has no name on this host."""
    with seam.suppress(KeyError, OverflowError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)


def start_ticks(pid: int | str) -> int | None:
    """Return the start time of a process, in clock ticks since the boot of this host, or None if it does not run.

    `pid` may also be `self/task/TID`, for a thread of this process.
    """
    # The program's name is in brackets and may contain any characters.
    fields = files.text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] not in ("Z", "X") else None


def pid_namespace() -> int:
    """Return the id of the namespace of this process's pid, or 0 if it is unknown.

    With this id, processes of containers that share a host name and have equal pids can be distinguished.
    """
    status = files.status("/proc/self/ns/pid")
    return 0 if status is None else status.st_ino


def own_stderr() -> str:
    """Return the path of stderr if it is a file with this pid in its name, as in Ray's workers, else an empty text."""
    path = files.link_target("/proc/self/fd/2")
    return path if re.search(rf"\b{os.getpid()}\b", os.path.basename(path)) and files.is_file(path) else ""


def own_rank() -> int:
    """Return the global rank of this process, which torchrun and other launchers set, or 0 if it is the only process.

    Lightning starts ranks without the variable `RANK`. Then torch.distributed has the rank, once it is initialized.
    """
    if rank := os.environ.get("RANK"):
        return int(rank)
    distributed = sys.modules.get("torch.distributed")
    set_up = getattr(distributed, "is_initialized", None)
    return int(getattr(distributed, "get_rank")() if set_up is not None and set_up() else _launched()[0])  # noqa: B009


def first_rank() -> bool:
    """Return True if this process is rank 0 or the only process. The first rank reports for all ranks."""
    return (os.environ.get("RANK") or _launched()[0]) == "0"


def ranks() -> int:
    """Return the number of ranks that a launcher such as torchrun has started, one trainer process each."""
    return int(os.environ.get("WORLD_SIZE") or _launched()[1])


def _launched() -> tuple[str, str]:
    """Return the rank and the number of ranks that the boot has written (`_boot/launch.py`)."""
    rank, _, count = os.environ.get("AUTOPROF_OWN_RANK", "").partition("/")
    return (rank, count) if rank.isdecimal() and count.isdecimal() else ("0", "1")
