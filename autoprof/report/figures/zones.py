"""Zones of a timeline file: parts of about 1 MB, each with the steps and the time that its spans cover.

A second reading, for some steps, reads only the zones that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from autoprof.rundir.records import PROCESS, Line

_NO_STEP = 1 << 60


class Zone(Struct, array_like=True):
    """A part of a file, from its first line to the next zone. A zone without spans matches no step."""

    begin: int
    start_ns: int = 1 << 63
    end_ns: int = 0
    first_step: int = _NO_STEP
    last_step: int = -_NO_STEP

    def has(self, step: int, start_ns: int, end_ns: int) -> bool:
        """Return True if the zone may have spans of a step, or spans that overlap a period."""
        of_step = self.first_step <= step <= self.last_step
        return of_step or (self.start_ns < end_ns and self.end_ns > start_ns)


def noted(spans: Iterable[Line], zones: list[Zone]) -> Iterator[Line]:
    """Yield the spans of a file, and add each to the last zone. The file's reader appends the zones."""
    for span in spans:
        yield span
        if span.kind == PROCESS:
            continue
        zone = zones[-1]
        if span.start_ns < zone.start_ns:
            zone.start_ns = span.start_ns
        if span.end_ns > zone.end_ns:
            zone.end_ns = span.end_ns
        if (step := span.step) is not None:
            if step < zone.first_step:
                zone.first_step = step
            if step > zone.last_step:
                zone.last_step = step


def parts(zones: Sequence[Zone], steps: Sequence[tuple[int, int, int]], end: int) -> list[tuple[int, int]]:
    """Return the parts of a file to read for some steps. Adjacent zones make one part.

    Args:
        zones: The file's zones.
        steps: The number, the start and the end of each step.
        end: The end of the last zone, as an offset in the file.
    """
    parts: list[tuple[int, int]] = []
    for zone, until in zip(zones, [*(zone.begin for zone in zones[1:]), end], strict=False):
        if any(zone.has(*step) for step in steps):
            if parts and parts[-1][1] == zone.begin:
                parts[-1] = parts[-1][0], until
            else:
                parts.append((zone.begin, until))
    return parts
