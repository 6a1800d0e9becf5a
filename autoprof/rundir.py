"""The run directory: names, and files that are complete when they have their name."""

from __future__ import annotations

import json
import os
import re
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoprof import _files, interrupts

PART = ".part"
TRACE = ".pt.trace.json.gz"
META = ".meta.json"
# What takes a capture's name from its start until it has a meta file.
TAKEN = META + PART
# torch_npu's folder: <name>_<pid>_<time>_ascend_pt, which tools that read it go by.
NPU_FOLDER = "_ascend_pt"
# What torch.cuda.memory writes, which its viewer takes (pytorch.org/memory_viz), and what nsys writes.
SNAPSHOT = ".pickle"
NSYS_REPORT = ".nsys-rep"
# How what a tool writes ends, before .part.
RAW_ENDINGS = (TRACE.removesuffix(".gz"), NPU_FOLDER, SNAPSHOT, NSYS_REPORT)
# What traces merged from others are called: this alone is the whole step, `merged.<of what>` a part of it.
MERGED = "merged"
TAR = ".tar"
# How folders begin in which a merge is going on.
MERGING = ".merge-"
# The folder in which `autoprof collect` keeps what is not complete.
COLLECTING = ".collect"
# What it came to.
COLLECTED = "collected.json"
_STEP = "global_step_"
# Role, stage and host stand in a name.
_LONGEST = 60


def host_name(name: str) -> str:
    """A host's name as files have it."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)[:_LONGEST] or "localhost"


HOST = host_name(socket.gethostname())


def tidy(name: str) -> str:
    """A name as it stands in file names: dots, slashes and what shells stumble over become `-`.

    Of one that is too long a number stands for the rest: what a file system takes as a name ends at 255 bytes.
    """
    short = re.sub(r"[^A-Za-z0-9_=+-]+", "-", name).strip("-") or "unnamed"
    if len(short) <= _LONGEST:
        return short
    return f"{short[: _LONGEST - 9]}-{zlib.crc32(name.encode(errors='surrogatepass')):08x}"


def is_merged(name: str) -> bool:
    """Whether files of this name, without endings, hold what other captures of the step hold already."""
    words = name.split(".")
    if words[0] == MERGED:
        return len(words) <= 2
    return words[1:2] != [] and words[1].startswith("replica") and words[2:3] == [MERGED]


def is_whole_step(path: Path) -> bool:
    """Whether this is where the merged trace of a whole step of a run is kept, which no part of it may take."""
    path = Path(os.path.realpath(path.parent), path.name)
    run = path.parent.parent
    if not os.path.lexists(run / "run.json") or not path.name.endswith((TRACE, TAR)):
        return False
    name = path.name.removesuffix(TRACE).removesuffix(TAR)
    if path.parent.name == "timeline":
        return name.startswith(_STEP) and name.endswith(f".{MERGED}")
    return name == MERGED and path.parent.name.startswith(_STEP)


def write_json(path: Path, content: Any) -> None:
    """Write a file that is there only when it is complete, in a folder that is made.

    Raises:
        OSError: It can't be written.
    """
    _files.folder(path.parent)
    _files.write(path, json.dumps(content, indent=1, default=str).encode() + b"\n")


def began(pid: int) -> int | None:
    """When a process of this host began, in ticks since the host did; None where it does not run (any more)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name of the program stands in brackets and may hold anything.
            fields = file.read().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, ValueError, IndexError) as error:
        interrupts.pass_on(error)
        return None


class RunDir:
    """Where all of a run's output goes. Making the object makes no folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def hooks(self) -> Path:
        return self.path / "hooks"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def oom(self) -> Path:
        """Where it is kept what CUDA's allocator held when it ran out of memory."""
        return self.path / "oom"

    def process_file(self, folder: str, ending: str) -> Path:
        """This process's file in `hooks` or `timeline`."""
        return self.path / folder / f"{HOST}-{os.getpid()}{ending}"

    def make(self, folder: Path) -> Path:
        """Make the run directory and a folder in it, where they are not there.

        Raises:
            OSError: They can't be made; a link is in the place of one.
        """
        _files.folder(self.path)
        _files.folder(folder)
        return folder

    def unwritable(self, error: BaseException) -> str:
        """Return the message for a run directory that can't be written: the same from whoever tries first."""
        return f"can't write to {self.path}: {error}; nothing will be left there"

    def step(self, number: int) -> Path:
        """The folder of a global step."""
        return self.path / f"{_STEP}{number:06d}"

    def steps(self) -> list[tuple[int, Path]]:
        """The step folders that are there, in order."""
        found = []
        for path in self.path.glob(f"{_STEP}*"):
            number = path.name.removeprefix(_STEP)
            # Others find the folder by the number.
            if number.isdecimal() and self.step(int(number)) == path and path.is_dir():
                found.append((int(number), path))
        return sorted(found)

    def parts(self) -> Iterator[Path]:
        """What is still being written, or was when its process died; but for merges that go on, and for the names of
        captures that are taken, of which there may be nothing yet."""
        # Not rglob, which raises where a folder gets its final name meanwhile.
        for place, folders, files in os.walk(self.path):
            names = [name for name in (*folders, *files) if name.endswith(PART) and not name.startswith(MERGING)]
            names = [name for name in names if not name.endswith(TAKEN)]
            yield from (Path(place, name) for name in names)
            folders[:] = [name for name in folders if not name.endswith((PART, NPU_FOLDER)) and name != COLLECTING]

    def point_latest(self) -> None:
        """Make `latest`, beside the run, point to this run."""
        link = self.path.with_name("latest")
        part = self.path.with_name(f"latest.{os.urandom(4).hex()}{PART}")
        try:
            part.symlink_to(self.path.name)
            os.replace(part, link)
        except OSError as error:  # a file system without links, or a real folder of that name
            interrupts.pass_on(error)
            part.unlink(missing_ok=True)
