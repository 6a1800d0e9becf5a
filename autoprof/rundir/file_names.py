"""Names of files and folders in a run directory."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from autoprof.base import identity
from autoprof.base.originals import os

# How a folder of torch_npu's ends (profiler/_profiler_path_creator.py).
FOLDER = re.compile(r"_\d+_\d+_ascend_pt$")
# What torch_npu's analysis makes in it, the first thing and the one that Perfetto opens.
NPU_ANALYSED = "ASCEND_PROFILER_OUTPUT"
NPU_TIMELINE = "trace_view.json"
NOT_ANALYSED = "torch_npu has not analysed it"

# The files and lines of `records`.
RUN = "run.json"
# One byte: the exit status of the process that started the run.
EXIT = "exit_status"
JSON = ".json"
LINES = ".jsonl"
PART = ".part"
TRACE = ".pt.trace.json.gz"
META = ".meta.json"
# What takes a capture's name from its start until it has a meta file.
TAKEN = META + PART
# What is there while a finished file has its final name already, and no meta file yet.
NAMED = f".named{PART}"
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
STEP = "global_step_"
# What the first reading of a large timeline comes to.
TIMELINE_INDEX = "timeline/index.msgpack"
REPORT = "report.html"


def tidy(name: str) -> str:
    """Return a name as it stands in file names: dots, slashes and what shells stumble over become `-`.

    Of one that is too long a number stands for the rest: what a file system takes as a name ends at 255 bytes.
    """
    short = re.sub(r"[^A-Za-z0-9_=+-]+", "-", name).strip("-") or "unnamed"
    if len(short) <= identity.LONGEST_NAME:
        return short
    return f"{short[: identity.LONGEST_NAME - 9]}-{zlib.crc32(name.encode(errors='surrogatepass')):08x}"


def is_merged(name: str) -> bool:
    """Return whether files of this name, without endings, hold what other captures of the step hold already."""
    words = name.split(".")
    if words[0] == MERGED:
        return len(words) <= 2
    return words[1:2] != [] and words[1].startswith("replica") and words[2:3] == [MERGED]


def same_place(path: Path, other: Path) -> bool:
    """Return whether two paths name one file, of which there may be none yet; a link at its place is the file."""
    return _placed(path) == _placed(other)


def is_whole_run(path: Path) -> bool:
    """Return whether this is where the report of a whole run is kept, which no other report may take."""
    path = _placed(path)
    return path.name == REPORT and os.path.lexists(path.parent / RUN)


def is_whole_step(path: Path) -> bool:
    """Return whether this is where the merged trace of a whole step of a run is kept, which no part of it may take."""
    path = _placed(path)
    run = path.parent.parent
    if not os.path.lexists(run / RUN) or not path.name.endswith((TRACE, TAR)):
        return False
    name = path.name.removesuffix(TRACE).removesuffix(TAR)
    if path.parent.name == "timeline":
        return name.startswith(STEP) and name.endswith(f".{MERGED}")
    return name == MERGED and path.parent.name.startswith(STEP)


def _placed(path: Path) -> Path:
    return Path(os.path.realpath(path.parent), path.name)
