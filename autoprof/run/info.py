"""Facts about a run. The process that starts the run passes them to its child processes in the environment.

If a launcher started the ranks, each rank takes its place in one common run.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from autoprof import _boot
from autoprof._boot import launch
from autoprof.base import files, identity, seam
from autoprof.base.originals import os, time
from autoprof.base.redact import redacted
from autoprof.config import settings, structs
from autoprof.config.parsers import MAX_NAME_BYTES
from autoprof.config.settings import Settings
from autoprof.config.values import GROUP, SettingsError
from autoprof.rundir import ranks
from autoprof.rundir.ranks import Seat


@structs.complete
class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the run, from the process that started the run. All processes of the run have the same facts."""

    id: str
    directory: str
    command: str
    cwd: str
    host: str
    pid: int
    started: float
    python: str
    settings: Settings
    # Start time of the process that started the run (`identity.start_ticks`). Its pid may be reused.
    ticks: int = 0
    # User id of the process that started the run. Ray's workers may run as another user: the user of the cluster.
    uid: int | None = None


# Maximum number of characters of the command line, and of all facts in total. Linux allows 128 kB for one environment
# variable, and often 2 MB for all variables and arguments (MAX_ARG_STRLEN and ARG_MAX).
_MAX_COMMAND_CHARS = 1000
_MAX_INFO_CHARS = 64_000


def read_info(given: Mapping[str, object] | None = None, late: bool = False) -> tuple[RunInfo, Seat | None]:
    """Return the facts about the run, and the place of this process among the ranks of a launch.

    If the environment has the facts, they come from there. Otherwise this process starts the run: the facts come from
    the settings, and are written to the environment for child processes. Only a process that starts a run and that a
    launcher started as a rank has a place; otherwise the place is None.

    Args:
        given: Settings from the program. They replace settings from the environment.
        late: True at the end of the run. A rank that has not joined the run before does not join it at the end.

    Raises:
        SettingsError: The settings are wrong, or too long for the environment.
    """
    info_text = os.environ.get(_boot.RUN_INFO)
    if info_text:
        return msgspec.json.decode(info_text, type=RunInfo), None
    own_settings = settings.load(os.environ, Path(_boot.started_in()), given)
    run_id = os.environ[_boot.RUN_ID]
    if run_id in (".", "..", "latest") or os.sep in run_id:
        raise SettingsError(f"{_boot.RUN_ID}: got {run_id[:80]!r}; it takes a folder's name other than 'latest'")
    if len(os.fsencode(run_id)) > MAX_NAME_BYTES:
        raise SettingsError(
            f"{_boot.RUN_ID}: got {run_id[:20]!r}...; it takes a folder's name, of {MAX_NAME_BYTES} bytes at most"
        )
    info = RunInfo(
        id=run_id,
        directory=os.path.join(own_settings.dir, run_id),
        command=redacted(getattr(sys, "orig_argv", sys.argv)),
        cwd=os.getcwd(),
        host=identity.HOST,
        pid=os.getpid(),
        ticks=identity.start_ticks(os.getpid()) or 0,
        uid=os.geteuid(),
        started=time.time(),
        python=platform.python_version(),
        settings=own_settings,
    )
    seat = None
    # The module `_boot` has found the launch and has written these variables.
    name, _, program = os.environ.get(launch.LAUNCH, "").partition(":")
    rank = os.environ.get(launch.LAUNCH_RANK, "").partition("/")[0]
    if program and rank.isdecimal() and not late:
        chosen_id = os.environ.get(launch.LAUNCH_RUN_ID, "")
        info, seat = join_launch(info, "" if chosen_id == name else chosen_id, name, program, int(rank))
    hand_on(info)
    if own_settings.recipes:
        # Child processes may have another working directory and not find the settings file. So they get the recipes
        # from the environment.
        os.environ[_boot.RECIPES] = os.pathsep.join(own_settings.recipes)
        _boot.add_recipes()
    return info, seat


def join_launch(info: RunInfo, run_id: str, name: str, program: str, rank: int) -> tuple[RunInfo, Seat | None]:
    """Take the place of this process among the ranks of a launch.

    Args:
        info: The facts about the run that this process would start alone.
        run_id: The id of the run that the user chose, or an empty text.
        name: The name of the launch.
        program: The random id of the program that the launcher started.
        rank: The rank of this process.

    Returns:
        The facts about the common run of the ranks, and the place of this process. In these facts, the process that
        joined first is the process that started the run. If the folder of the runs can't be written, return `info` and
        None. The first applied hook then reports the problem.
    """
    own_settings = info.settings
    files.open_to_group(own_settings.access == GROUP)
    with seam.suppress(OSError):
        seat = ranks.join(
            Path(own_settings.dir), run_id, name, program, rank, again=name.startswith(launch.LAUNCH_AGAIN)
        )
        leader = seat.first
        starter = {"host": leader.host, "pid": leader.pid, "ticks": leader.ticks, "started": leader.started}
        return msgspec.structs.replace(with_id(info, seat.run_id), **starter), seat
    return info, None


def with_id(info: RunInfo, run_id: str) -> RunInfo:
    """Return the facts with another run id, and with the run directory of that id."""
    return msgspec.structs.replace(info, id=run_id, directory=os.path.join(info.settings.dir, run_id))


def hand_on(info: RunInfo) -> None:
    """Write the facts about the run to the environment, for the processes that this process starts.

    Raises:
        SettingsError: The facts are too long, or are not UTF-8.
    """
    own_settings = info.settings
    # The URL to which the run is copied stays in this process, because the URL may contain a password.
    public_settings = msgspec.structs.replace(own_settings, collect="1" if own_settings.collect else "")
    cut_chars = len(info.command) - _MAX_COMMAND_CHARS
    command = (
        info.command if cut_chars <= 0 else f"{info.command[:_MAX_COMMAND_CHARS]}... ({cut_chars} characters more)"
    )
    public_info = msgspec.structs.replace(info, settings=public_settings, command=command)
    try:
        text = msgspec.json.encode(public_info).decode()
    except UnicodeEncodeError as error:
        seam.pass_on(error)
        raise SettingsError(
            f"{error.object[error.start - 20 if error.start > 20 else 0 : error.end + 20]!r} in the settings or the "
            "working directory is not UTF-8; autoprof needs names in UTF-8"
        ) from None
    if len(text) > _MAX_INFO_CHARS:
        raise SettingsError(
            f"the settings are {len(text)} characters long; at most {_MAX_INFO_CHARS} can be handed to the processes "
            "of a run; shorten the longest of them"
        )
    os.environ[_boot.RUN_ID], os.environ[_boot.RUN_INFO] = info.id, text
