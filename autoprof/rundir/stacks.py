"""Structs of the files in `stacks/` and `hangs/`: where each process of a run stood at a moment.

A folder in one of the two is a request: each process of the run that sees it writes one file there.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from autoprof.config import structs
from autoprof.rundir.lines import Count, Id
from autoprof.rundir.records import Frame as Frame
from autoprof.rundir.records import Ns, Number, Size

# The folders of requests by a person, and by a step that takes too long.
STACKS, HANGS = "stacks", "hangs"
# No file of a process is larger; a hang has two, of its stacks and of torch.
MOST_BYTES = 1 << 19
# How the file begins that says who asked, and why.
WHY = "why.json"


class OpenSpan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A span that has begun and not ended, as on the timeline."""

    kind: str = ""  # The kind of the span.
    name: str = ""  # Its name.
    step: Number | None = None  # The step.
    role: str = ""  # The role.
    rank: Number | None = None  # The rank.
    start_ns: Ns = 0  # The start, in nanoseconds since the epoch.
    ids: Mapping[str, Id | None] = {}  # Which of many it is.
    stage_kind: str = ""  # The kind of the stage.


class Thread(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A thread and its stack, the outermost function first."""

    name: str = ""  # Its name, as Python knows it; empty for one that it does not know.
    ident: Number = 0  # Python's number of it.
    native: Number = 0  # The kernel's number of it.
    main: bool = False  # Whether it is the main thread.
    frames: list[Frame] = []  # Its functions.
    spans: list[Number] = []  # The spans that it works on, by their places in `spans`.


class Task(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A task of asyncio and the coroutines that await each other, the outermost first."""

    name: str = ""  # Its name.
    frames: list[Frame] = []  # Its coroutines.
    waits_on: str = ""  # What the innermost one awaits, such as `Future` or `Task-7`.
    spans: list[Number] = []  # The spans that it works on, by their places in `spans`.
    thread: Number = 0  # Python's number of the thread that runs it now; 0 for one that waits.


@structs.complete
class Why(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`stacks/<time>/why.json` and `hangs/step_<step>/why.json`: who asked all processes where they stand, and why."""

    host: str = ""  # The host of the process that asked.
    pid: Number = 0  # That process.
    unix_ns: Ns = 0  # When it asked, in nanoseconds since the epoch.
    step: Number | None = None  # The step that takes too long.
    since_ns: Ns = 0  # When that step began.
    condition: str = ""  # The condition of `AUTOPROF_WHEN`.
    reason: str = ""  # The reason in words.


@structs.complete
class ProcessStacks(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`stacks/<time>/<host>-<pid>.json` and `hangs/step_<step>/<host>-<pid>.json`: where one process stood."""

    host: str  # The host.
    pid: Number  # The process.
    unix_ns: Ns  # The time, in nanoseconds since the epoch.
    process: str = ""  # Its command line, or the title that Ray gave it.
    rank: Number | None = None  # The rank.
    by: str = ""  # `itself`, or the tool that looked from outside.
    left_out: list[str] = []  # What is not told, and why.
    spans: list[OpenSpan] = []  # The spans that were open, oldest first.
    threads: list[Thread] = []  # The main thread first.
    tasks: list[Task] = []  # The tasks of asyncio.
    # Sizes in bytes by name: `resident`, `peak_resident`, `host_used`, `host_total`, `cgroup_used`, `cgroup_limit`,
    # `device_used`, `device_total`. Of devices it is what torch holds there, of those that the process uses.
    memory: dict[str, Size] = {}
    # The state of an engine by name: `running`, `waiting`, `free_blocks`, `total_blocks`, `longest_s`, `longest`.
    engine: dict[str, Count | str] = {}
    flight_record: str = ""  # The file beside this one with torch's record of its collectives.
