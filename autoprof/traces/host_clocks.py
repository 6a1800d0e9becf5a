"""Offsets of the clocks of a run's hosts, measured while it ran.

`clocks/<host of the driver>-<pid>.jsonl` has a line for each measurement: by how much a host's clock is ahead of the
driver's host's, right to within how much, and when. Without it nobody knows: clocks that NTP sets are apart by
milliseconds, others by minutes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from autoprof.rundir.jsonl import lines
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import Offset
from autoprof.traces.reader import NO_JSON, TraceError

MEASURED, AS_SET = "measured", "as-set"
# Stages take milliseconds and more. What is known worse than this does not tell which of two came first.
MOST_ERROR_NS = 5_000_000
# Two clocks of quartz drift apart by 50 parts in a million each.
_DRIFT = 100e-6
_INSTEAD = f"merge with --clocks {AS_SET} to take them as they are set"


class Clocks(Struct, frozen=True):
    """The offsets that were measured in a run.

    Attributes:
        driver: The host that the offsets are against; empty where nothing was measured.
        offsets: By host, in the order of their times.
    """

    driver: str
    offsets: dict[str, list[Offset]]


def read(run: Path) -> Clocks:
    """Return what was measured in a run; lines that are cut off are left out.

    Raises:
        TraceError: Several hosts measured, so that it is not known against which.
        OSError: A file can't be read, or is none.
    """
    found: dict[str, list[Offset]] = {}
    drivers = set()
    for path in RunDir(run).lines("clocks"):
        drivers.add(path.stem.rpartition("-")[0])
        for line in lines(path):
            try:
                offset = msgspec.json.decode(line or b"", type=Offset)
            except NO_JSON:
                continue
            found.setdefault(offset.host, []).append(offset)
    if len(drivers) > 1:
        raise TraceError(f"{run / 'clocks'}: clocks were measured from several hosts ({_list(drivers)}); {_INSTEAD}")
    for offsets in found.values():
        offsets.sort(key=lambda each: each.unix_ns)
    return Clocks(next(iter(drivers), ""), found)


def offset_ns(clocks: Clocks, host: str, unix_ns: int) -> int:
    """Return what to take from a host's times to have them on the clock of the driver's host.

    Args:
        clocks: What was measured.
        host: The host.
        unix_ns: When, by either's clock.

    Raises:
        TraceError: It is not known, or not well enough.
    """
    if host == clocks.driver:
        return 0
    measured = clocks.offsets.get(host)
    if not measured:
        what = f"none was measured for {host}" if clocks.driver else "none was measured in this run"
        raise TraceError(f"traces of several hosts need the offsets of their clocks, and {what}; {_INSTEAD}")
    nearest = min(measured, key=lambda each: abs(each.unix_ns - unix_ns))
    if nearest.error_ns > MOST_ERROR_NS:
        raise TraceError(
            f"the clock of {host} is known to {nearest.error_ns / 1e6:.1f} ms only, and more than "
            f"{MOST_ERROR_NS / 1e6:.0f} ms is too much; {_INSTEAD}"
        )
    place = measured.index(nearest)
    for other in measured[max(0, place - 1) : place + 2]:
        # Between two measurements that agree the clock was not set; the trace may lie on either side of this one.
        passed = abs(other.unix_ns - nearest.unix_ns)
        between = min(other.unix_ns, nearest.unix_ns) <= unix_ns <= max(other.unix_ns, nearest.unix_ns)
        apart = abs(other.offset_ns - nearest.offset_ns)
        if between and apart > other.error_ns + nearest.error_ns + _DRIFT * passed:
            raise TraceError(
                f"the clock of {host} was set while the step ran: {other.offset_ns / 1e6:.1f} ms and "
                f"{nearest.offset_ns / 1e6:.1f} ms were measured around it; {_INSTEAD}"
            )
    return nearest.offset_ns


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
