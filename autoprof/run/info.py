"""Facts of a run that its first process hands to all others, in the environment."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from autoprof import _boot
from autoprof.base import identity, interrupts
from autoprof.base.originals import os, time
from autoprof.base.redact import redacted
from autoprof.config import sources, structs
from autoprof.config.parsers import LONGEST_NAME
from autoprof.config.settings import Settings
from autoprof.config.values import SettingsError
from autoprof.run import seat
from autoprof.rundir.ranks import Seat


@structs.complete
class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the process that started the run knows."""

    id: str
    directory: str
    command: str
    cwd: str
    host: str
    pid: int
    started: float
    python: str
    settings: Settings
    # When the process began (`identity.began`): pids come again.
    ticks: int = 0
    # The user of the process. Ray's workers may run as the cluster's user.
    uid: int | None = None


# Characters of a command line in the environment, and of all that a process hands on there.
_MOST_COMMAND = 1000
_MOST_HANDED = 64_000


def shortened(command: str) -> str:
    """Shorten a command line to what fits in the environment.

    Linux allows 128 kB a variable, and often 2 MB in all with the arguments (MAX_ARG_STRLEN and ARG_MAX).
    """
    cut = len(command) - _MOST_COMMAND
    return command if cut <= 0 else f"{command[:_MOST_COMMAND]}... ({cut} characters more)"


def read(given: Mapping[str, object] | None = None, late: bool = False) -> RunInfo:
    """Read what was handed on, or the settings in the process that starts the run, which hands them on here.

    Args:
        given: Settings that the program gives, over those of the environment.
        late: The run is at its end: a rank that has not joined it leaves nothing.

    Raises:
        SettingsError: The settings are wrong, or too long to be handed on.
    """
    handed = os.environ.get(_boot.RUN_INFO)
    if handed:
        return msgspec.json.decode(handed, type=RunInfo)
    read = sources.load(os.environ, Path(_boot.started_in()), given)
    run_id = os.environ[_boot.RUN_ID]
    if run_id in (".", "..", "latest") or os.sep in run_id:
        raise SettingsError(f"{_boot.RUN_ID}: got {run_id[:80]!r}; it takes a folder's name other than 'latest'")
    if len(os.fsencode(run_id)) > LONGEST_NAME:
        raise SettingsError(
            f"{_boot.RUN_ID}: got {run_id[:20]!r}...; it takes a folder's name, of {LONGEST_NAME} bytes at most"
        )
    info = RunInfo(
        id=run_id,
        directory=os.path.join(read.dir, run_id),
        command=redacted(getattr(sys, "orig_argv", sys.argv)),
        cwd=os.getcwd(),
        host=identity.HOST,
        pid=os.getpid(),
        ticks=identity.began(os.getpid()) or 0,
        uid=os.geteuid(),
        started=time.time(),
        python=platform.python_version(),
        settings=read,
    )
    info = info if late else with_seat(info, seat.join_launch(read))
    hand_on(info)
    if read.recipes:
        # Makes the settings file's recipes known to the children too, in whatever directory they work.
        os.environ[_boot.RECIPES] = os.pathsep.join(read.recipes)
        _boot.add_recipes()
    return info


def with_seat(info: RunInfo, taken: Seat | None) -> RunInfo:
    """Return the facts of the run in which this rank has its place: the rank that joined first has started it."""
    if taken is None:
        return info
    first = taken.first
    whose = {"host": first.host, "pid": first.pid, "ticks": first.ticks, "started": first.started}
    return msgspec.structs.replace(named(info, taken.run_id), **whose)


def named(info: RunInfo, run_id: str) -> RunInfo:
    """Return the facts of a run that has this name."""
    return msgspec.structs.replace(info, id=run_id, directory=os.path.join(info.settings.dir, run_id))


def hand_on(info: RunInfo) -> None:
    """Hand the facts of the run to the processes that this one starts.

    Raises:
        SettingsError: They are too long.
    """
    read = info.settings
    # The URL of the run's copy stays in this process: it may hold a password.
    told = msgspec.structs.replace(read, collect="1" if read.collect else "")
    handed_on = msgspec.structs.replace(info, settings=told, command=shortened(info.command))
    try:
        text = msgspec.json.encode(handed_on).decode()
    except UnicodeEncodeError as error:
        interrupts.pass_on(error)
        raise SettingsError(
            f"{error.object[error.start - 20 if error.start > 20 else 0 : error.end + 20]!r} in the settings, or the "
            "working directory, is no UTF-8: autoprof takes names in UTF-8 alone"
        ) from None
    if len(text) > _MOST_HANDED:
        raise SettingsError(
            f"the settings are {len(text)} characters long, and no more than {_MOST_HANDED} can be handed to the "
            "processes of a run: shorten the longest of them"
        )
    os.environ[_boot.RUN_ID], os.environ[_boot.RUN_INFO] = info.id, text
