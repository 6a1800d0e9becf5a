"""Layout of a run directory: the paths of its files and folders, and how they are made."""

from __future__ import annotations

import errno
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from autoprof.base import files, identity, log, seam
from autoprof.base.exception_text import described, text
from autoprof.base.originals import json, os
from autoprof.rundir import file_names
from autoprof.rundir.file_names import LINES

# Folder for the stacks of crashed processes.
CRASHES = "crashes"
# Beginning of the ids of runs that autoprof generates.
_GENERATED_ID = re.compile(r"[0-9]{8}-[0-9]{6}-|slurm-|mpi-|ranks-")
# Name of the folder that is the default of AUTOPROF_DIR. Only autoprof writes to a folder with this name.
_DEFAULT_RUNS = "autoprof_runs"


def write_json(path: Path, content: Any) -> None:
    """Write a struct or other JSON content to a file. The file appears only when it is complete. Make its folder.

    Raises:
        OSError: The file can't be written.
    """
    files.folder(path.parent)
    files.write(path, json.dumps(content, indent=1, default=_plain).encode() + b"\n")


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else str(value)


def step_folders(run: str | Path) -> list[tuple[int, str]]:
    """Return the numbers and names of the step folders in a run directory, sorted by number."""
    numbered_folders = [(name.removeprefix(file_names.STEP), name) for name in files.folders_in(run)]
    # Readers compute the name of the folder from the number. So a folder with any other spelling is skipped.
    return sorted(
        (int(number), name) for number, name in numbered_folders if number.isdecimal() and name == _step(int(number))
    )


def _step(number: int) -> str:
    return f"{file_names.STEP}{number:06d}"


class RunDir:
    """The directory with all output of a run. Creating this object does not create the directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def run_json(self) -> Path:
        return self.path / file_names.RUN

    @property
    def exit_status(self) -> Path:
        return self.path / file_names.EXIT

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def oom(self) -> Path:
        """Return the folder for the snapshots that are taken when CUDA's allocator runs out of memory."""
        return self.path / "oom"

    def process_file(self, folder: str, ending: str = LINES) -> Path:
        """Return the path of this process's file in `folder`, which is `journal`, `clocks` or `crashes`."""
        return self.path / folder / f"{identity.HOST}-{os.getpid()}{ending}"

    def lines(self, folder: str) -> list[Path]:
        """Return the paths of the files of all processes in `folder`, which is `journal` or `clocks`, sorted."""
        return sorted((self.path / folder).glob(f"*{LINES}"), key=str)

    def make(self, folder: Path) -> Path:
        """Make the run directory and a folder in it, if they do not exist. Return the folder.

        Raises:
            OSError: The run directory or the folder can't be made, or is a symbolic link.
        """
        runs = self.path.parent
        is_own_folder = runs.name == _DEFAULT_RUNS
        status = files.status(self.path, follow=False)
        if status is None or not stat.S_ISDIR(status.st_mode):
            is_own_folder = is_own_folder or not files.is_folder(runs)
            files.folder(self.path, own=2)
        files.folder(folder)
        if is_own_folder:
            _hide_from_git(runs)
        return folder

    def unwritable(self, error: BaseException) -> str:
        """Return the warning for a run directory that can't be written.

        All callers log the same text, so that it is logged only once.
        """
        problem = text(error)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = os.strerror(error.errno)  # a full disk concerns all files
        return f"can't write to {self.path}: {problem}; nothing is recorded there until it can be written"

    def report(self, what: str, error: BaseException, log_line: Callable[[str], None] = log.warning_once) -> None:
        """Log an error of autoprof's own work for this run.

        Args:
            what: A text that describes the work.
            error: The error.
            log_line: Function that logs one line.
        """
        log_line(self.unwritable(error) if isinstance(error, OSError) else f"{what}: {described(error)}")

    def step(self, number: int) -> Path:
        """Return the folder of a global step."""
        return self.path / _step(number)

    def steps(self) -> list[tuple[int, Path]]:
        """Return the numbers and paths of the existing step folders, sorted by number."""
        return [(number, self.path / name) for number, name in step_folders(self.path)]

    def parts(self) -> Iterator[Path]:
        """Yield the paths of incomplete files: a process is writing them, or died while it was writing them.

        Omit the files of running merges, and files that only reserve the name of a capture.
        """
        # `rglob` is not used, because it raises if a folder is renamed during the search.
        for parent, folders, present in files.walk(self.path):
            names = [
                name
                for name in (*folders, *present)
                if name.endswith(file_names.PART) and not name.startswith(file_names.MERGING)
            ]
            names = [name for name in names if not name.endswith(file_names.TAKEN)]
            yield from (Path(parent, name) for name in names)
            folders[:] = [
                name
                for name in folders
                if not name.endswith((file_names.PART, file_names.NPU_FOLDER)) and name != file_names.COLLECTING
            ]

    def point_latest(self) -> None:
        """Point the link `latest` in the parent folder to this run. If `latest` is not a link to a run, keep it."""
        link = self.path.with_name("latest")
        if files.exists(link, follow=False) and not _points_to_run(link):
            log.warning_once(f"{link} is not a link to a run, so autoprof does not change it")
            return
        part = link.with_name(f"{link.name}.{os.urandom(4).hex()}{file_names.PART}")
        with seam.suppress(OSError):  # a file system without links
            os.symlink(self.path.name, part)
            os.replace(part, link)
        files.remove(str(part))


def _points_to_run(link: Path) -> bool:
    """Return True if a path is a link to a run in the same folder.

    Also return True if the run was removed, if the link names an id that autoprof generated.
    """
    target = files.link_target(link)
    if os.sep in target or target in ("", ".", ".."):
        return False
    run = link.with_name(target)
    return files.exists(run / file_names.RUN, follow=False) or (
        not files.exists(run, follow=False) and _GENERATED_ID.match(target) is not None
    )


def _hide_from_git(folder: Path) -> None:
    """Hide a folder from git and from Ray's upload of `working_dir`, unless it already has a `.gitignore`.

    Ray uploads the files that no `.gitignore` excludes, and refuses more than 512 MiB (Ray 2.60,
    ray/_private/runtime_env/packaging.py).
    """
    path = folder / ".gitignore"
    if not files.exists(path, follow=False):
        with seam.suppress(OSError):
            files.write(path, b"*\n")


# Name of the file in `control/` that switches autoprof off in the run.
OFF = "off"


def switched_off(run: RunDir) -> bool:
    """Return True if autoprof is switched off in the run."""
    return files.exists(run.control / OFF, follow=False)
