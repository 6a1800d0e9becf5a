"""Names of the files and folders in a run directory."""

from __future__ import annotations

import functools
import re
import zlib
from pathlib import Path

from autoprof.base import identity
from autoprof.base.originals import os

# End of the name of a torch_npu folder (torch_npu's profiler/_profiler_path_creator.py).
FOLDER = re.compile(r"_\d+_\d+_ascend_pt$")
# The folder that the analysis of torch_npu writes, and the file in that folder that Perfetto opens.
NPU_ANALYSED = "ASCEND_PROFILER_OUTPUT"
NPU_TIMELINE = "trace_view.json"
NOT_ANALYSED = "torch_npu has not analysed it"

# The formats of these files are in `records.py`.
RUN = "run.json"
# File with one byte: the exit status of the process that started the run.
EXIT = "exit_status"
JSON = ".json"
LINES = ".jsonl"
PART = ".part"
TRACE = ".pt.trace.json.gz"
META = ".meta.json"
# Ending of the file that reserves the name of a capture, from the start of the capture until its meta file exists.
TAKEN = META + PART
# Ending of the file that marks a finished trace: the trace has its final name, but no meta file yet.
NAMED = f".named{PART}"
# torch_npu names its folder <name>_<pid>_<time>_ascend_pt. Tools that read the folder rely on this name.
NPU_FOLDER = "_ascend_pt"
# Ending of a snapshot that torch.cuda.memory writes. The viewer at pytorch.org/memory_viz opens it.
SNAPSHOT = ".pickle"
NSYS_REPORT = ".nsys-rep"
# Endings of the files that the profilers themselves write. While a file is incomplete, .part follows the ending.
RAW_ENDINGS = (TRACE.removesuffix(".gz"), NPU_FOLDER, SNAPSHOT, NSYS_REPORT)
# Name of a merged trace: `merged` for the whole step, `merged.<part>` for a part of the step.
MERGED = "merged"
# Prefix of the name of a merge's temporary folder.
MERGING = ".merge-"
# Folder for the incomplete files of `autoprof collect`.
COLLECTING = ".collect"
# File in which `autoprof collect` writes its result.
COLLECTED = "collected.json"
STEP = "global_step_"
# From the second loop of a process on, the name of a step's folder has this suffix, with the number of the loop.
LOOP = ".loop"
# Cache of a large run. The first command that reads the run writes it. `autoprof collect` does not copy hidden files.
CACHE = ".cache.msgpack"
REPORT = "report.html"


# Name of a file that one process writes: its host and pid, and a number if another process with the same host and pid
# has a file.
_OF_PROCESS = re.compile(r"(?P<host>.*)-(?P<pid>[0-9]{1,10})(\.[0-9]+)?\.[a-z]+")


def process_of(name: str) -> tuple[str, int]:
    """Return the host and the pid of the process that wrote the file with this name.

    If the name does not have the form of such a file, return the name without its ending, and 0.
    """
    match = _OF_PROCESS.fullmatch(name)
    return (match["host"], int(match["pid"])) if match else (Path(name).stem, 0)


@functools.lru_cache
def tidy(name: str) -> str:
    """Return a name in a form for file names: dots, slashes and special characters of shells become `-`.

    If the name is too long, a checksum replaces its end, because file systems limit names to 255 bytes.
    """
    short = re.sub(r"[^A-Za-z0-9_=+-]+", "-", name).strip("-") or "unnamed"
    if len(short) <= identity.MAX_NAME_CHARS:
        return short
    return f"{short[: identity.MAX_NAME_CHARS - 9]}-{zlib.crc32(name.encode(errors='surrogatepass')):08x}"


def is_merged(name: str) -> bool:
    """Return True if the capture with this name was merged from other captures of the step.

    `name` is the common name of the capture's files, without endings.
    """
    words = name.split(".")
    if words[0] == MERGED:
        return len(words) <= 2
    return words[1:2] != [] and words[1].startswith("replica") and words[2:3] == [MERGED]


def same_place(path: Path, other: Path) -> bool:
    """Return True if two paths name the same file. The file need not exist.

    If a path is a symbolic link, the link itself is compared, not the file to which it points.
    """
    return _resolved(path) == _resolved(other)


def is_whole_run(path: Path) -> bool:
    """Return True if `path` is the path at which autoprof writes the report of a whole run."""
    path = _resolved(path)
    return path.name == REPORT and os.path.lexists(path.parent / RUN)


def is_whole_step(path: Path) -> bool:
    """Return True if `path` is the path at which autoprof writes the merged trace of a whole step."""
    path = _resolved(path)
    run = path.parent.parent
    if not os.path.lexists(run / RUN) or not path.name.endswith(TRACE):
        return False
    name = path.name.removesuffix(TRACE)
    if path.parent.name == "journal":
        return name.startswith(STEP) and name.endswith(f".{MERGED}")
    return name == MERGED and path.parent.name.startswith(STEP)


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path.parent), path.name)
