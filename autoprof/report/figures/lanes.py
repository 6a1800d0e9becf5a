"""Lanes of a step: spans of each process, gaps in which all of them are idle, and ranks slower than the others."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from autoprof.base.intervals import Interval, Union, segments
from autoprof.config.values import role_place
from autoprof.report.figures import words
from autoprof.report.figures.overview import Recorded
from autoprof.report.figures.words import OTHER, PROFILING
from autoprof.report.model import Gap, Lane, PathPart, Skew, SkewRow, SpanRow
from autoprof.rundir.journal import Journal
from autoprof.rundir.records import Line

# Spans of a lane that are kept, the longest ones. A plot can't show more.
_MAX_SPANS = 500
# Kinds of spans that are not work: a capture's window, the step itself, autoprof's own time.
_NO_WORK = ("window", "step", PROFILING)
# Shortest gap between workers that is shown.
_MIN_GAP_NS = 50_000_000

_Span = tuple[int, int, str, str, Line]


# Lanes that a report shows. More would make the plot unreadable.
MAX_LANES = 96


class LaneSpans:
    """Spans of one process under one role, in one step."""

    def __init__(self, file: int, role: str, replica: int | None) -> None:
        self.file, self.role, self.replica = file, role, replica
        self.rank: int | None = None
        self.label = ""
        self.busy = Union()
        self.profiling = Union()
        self.worked = False
        self.count = 0
        # A heap, the shortest first. The number breaks ties, so that lines are never compared.
        self._longest: list[tuple[int, int, Line]] = []
        self.stages: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.requests_s = array("d")
        self.per_token_s = array("d")

    def add(self, line: Line) -> None:
        if line.kind not in _NO_WORK:
            self.busy.add(line.start_ns, line.end_ns)
        if line.kind == PROFILING:
            self.profiling.add(line.start_ns, line.end_ns)
        else:
            self.worked = True
        if line.kind in ("turn", "tool", "reward"):
            return
        self.count += 1
        kept = (line.end_ns - line.start_ns, self.count, line)
        if len(self._longest) < _MAX_SPANS:
            heapq.heappush(self._longest, kept)
        else:
            heapq.heappushpop(self._longest, kept)
        if line.kind == "request":
            took = (line.end_ns - line.start_ns) / 1e9
            self.requests_s.append(took)
            if (tokens := line.counts.get("response_tokens") or 0) >= 1:
                self.per_token_s.append(took / tokens)

    def spans(self) -> list[Line]:
        """Return the longest spans, by start."""
        return sorted((line for _, _, line in self._longest), key=lambda line: (line.start_ns, -line.end_ns))

    def row(self, journal: Journal, start_ns: int, end_ns: int) -> Lane:
        """Return the lane for the report."""
        busy = self.busy.length(start_ns, end_ns)
        return Lane(
            label=self.label,
            role=self.role,
            rank=self.rank,
            replica=self.replica,
            host=journal.host,
            pid=journal.pid,
            file=journal.name,
            spans=[_span_row(line, start_ns) for line in self.spans()],
            left_out=self.count - len(self._longest),
            busy_s=busy / 1e9,
            idle_s=(end_ns - start_ns - busy) / 1e9,
        )


class Lanes:
    """Lanes of one step. `driver` is the number of the driver's file."""

    def __init__(self, journals: Sequence[Journal], driver: int, start_ns: int, end_ns: int) -> None:
        self._journals = journals
        self._driver = driver
        self._start, self._end = start_ns, end_ns
        self._lanes: dict[tuple[int, str, int | None], LaneSpans] = {}

    def add(self, file: int, line: Line, own: bool) -> None:
        """Add a span. `own` is True if it belongs to this step, and not to another step at the same time."""
        replica = line.ids.get("replica")
        key = (file, line.role, replica if isinstance(replica, int) else None)
        if (lane := self._lanes.get(key)) is None:
            lane = self._lanes[key] = LaneSpans(*key)
        if lane.rank is None:
            lane.rank = line.rank
        lane.add(line)
        if own and line.kind == "stage":
            lane.stages[line.name].append((line.start_ns, line.end_ns))

    def finish(self) -> list[LaneSpans]:
        """Return the lanes with their labels, in display order."""
        # Skip an engine's workers, which record only their profiler. The replica's server records the work.
        order = sorted((lane for lane in self._lanes.values() if lane.worked), key=self._order)
        for name in (_label, _with_rank, self._with_process):
            like = Counter(lane.label or name(lane) for lane in order)
            for lane in order:
                if not lane.label and like[name(lane)] == 1:
                    lane.label = name(lane)
        loops = [lane for lane in order if lane.role == "agent_loop"]
        for number, lane in enumerate(loops if len(loops) > 1 else []):
            lane.label = f"agent_loop {number}"
        return order

    def _with_process(self, lane: LaneSpans) -> str:
        journal = self._journals[lane.file]
        return f"{_with_rank(lane)} on {journal.host}, pid {journal.pid}"

    def _order(self, lane: LaneSpans) -> tuple[int, str, int, int, str, int]:
        journal = self._journals[lane.file]
        numbers = (-1 if lane.replica is None else lane.replica, -1 if lane.rank is None else lane.rank)
        return role_place(lane.role), lane.role, *numbers, journal.host, journal.pid

    def shown(self, lanes: Sequence[LaneSpans]) -> list[LaneSpans]:
        """Return the lanes to show: all of them, or, if there are too many, the busiest and the idlest of each role."""
        if len(lanes) <= MAX_LANES:
            return list(lanes)
        roles: dict[str, list[LaneSpans]] = defaultdict(list)
        for lane in sorted(lanes, key=lambda lane: lane.busy.length(self._start, self._end)):
            roles[lane.role].append(lane)
        half = max(1, MAX_LANES // len(roles) // 2)
        kept = {id(lane) for of_role in roles.values() for lane in (*of_role[:half], *of_role[-half:])}
        return [lane for lane in lanes if id(lane) in kept]

    def gaps(self, lanes: Iterable[LaneSpans]) -> list[Gap]:
        """Return the times in which all of the driver's workers were idle.

        Two kinds of time are left out: waits of the driver for work without spans in any worker, such as the work of an
        engine without hooks; and autoprof's own time in any process.
        """
        lanes = list(lanes)
        workers = [lane for lane in lanes if lane.file != self._driver]
        drivers = [line for lane in lanes if lane.file == self._driver for line in lane.spans() if _is_stage(line)]
        working = Union(piece for lane in workers for piece in lane.busy.within(self._start, self._end))
        pieces = working.pieces()
        if not pieces:
            return []
        recorded = {
            words.meaning(line.name, line.kind, line.stage_kind)
            for lane in workers
            for line in lane.spans()
            if _covers_work(line)
        }
        loops = any(lane.role == "agent_loop" for lane in workers)
        if loops and words.GENERATION not in recorded | {
            words.meaning(line.name, stage_kind=line.stage_kind) for line in drivers
        }:
            return []
        silent = Union(
            (line.start_ns, line.end_ns)
            for line in drivers
            if (meaning := words.meaning(line.name, stage_kind=line.stage_kind)) not in recorded
            and meaning not in (words.SCORING, words.TRAINING, OTHER)
        )
        for lane in self._lanes.values():
            for start, end in lane.profiling.pieces():
                silent.add(start, end)
        gaps = []
        for start, end in working.without(pieces[0][0], pieces[-1][1]):
            for low, high in silent.without(start, end):
                if high - low >= _MIN_GAP_NS:
                    gaps.append(self._gap(low, high, start, end, workers, drivers))
        return gaps

    def _gap(self, low: int, high: int, start: int, end: int, workers: list[LaneSpans], drivers: list[Line]) -> Gap:
        after, before = _edge(workers, start, 1), _edge(workers, end, 0)
        owners = segments([(line.name, line.start_ns, line.end_ns) for line in drivers], low, high)
        within = max(owners, key=lambda owner: owner[2] - owner[1], default=(OTHER, low, low))
        covered = sum(owner[2] - owner[1] for owner in owners)
        driver_stage = within[0] if 2 * covered >= high - low else OTHER
        pair = (after[1], before[1])
        trained = (words.SCORING, words.TRAINING)
        is_between = pair[0] == words.GENERATION and pair[1] in trained
        return Gap(
            start_s=(low - self._start) / 1e9,
            end_s=(high - self._start) / 1e9,
            after=after[0],
            before=before[0],
            between="generation and training" if is_between else "stages",
            within=driver_stage,
        )

    def path(self, lanes: Iterable[LaneSpans]) -> list[PathPart]:
        """Return the driver's stages in their order, each with the worker's span that ended last in it."""
        lanes = list(lanes)
        drivers = [line for lane in lanes if lane.file == self._driver for line in lane.spans() if _is_stage(line)]
        own = [(line.name, line.start_ns, line.end_ns) for line in drivers if line.kind == "timer"]
        own = own or [(line.name, line.start_ns, line.end_ns) for line in drivers]
        spans = [
            (line.end_ns, line, lane)
            for lane in lanes
            if lane.file != self._driver
            for line in lane.spans()
            if line.kind in ("stage", "sample")
        ]
        path = []
        for name, start, end in segments(own, self._start, self._end):
            if (end - start) * 100 < self._end - self._start:
                continue
            ended = [each for each in spans if start < each[0] <= end]
            last = max(ended, key=lambda each: each[0], default=None)
            path.append(
                PathPart(
                    stage=name,
                    start_s=(start - self._start) / 1e9,
                    end_s=(end - self._start) / 1e9,
                    held_by=None if last is None else f"{_named(last[1])} of {last[2].label}",
                )
            )
        return path


def _edge(lanes: Iterable[LaneSpans], at: int, side: int) -> tuple[str, str]:
    """Return the words for a worker's span that ends (`side` 1) or begins (0) at a moment, and its meaning."""
    for lane in lanes:
        if not any(piece[side] == at for piece in lane.busy.pieces()):
            continue
        for line in lane.spans():
            if (line.start_ns, line.end_ns)[side] == at and line.kind not in _NO_WORK:
                return f"{_named(line)} of {lane.label}", words.meaning(line.name, line.kind, line.stage_kind)
        return lane.label, words.GENERATION if lane.role in ("rollout", "agent_loop") else OTHER
    return OTHER, OTHER


def _covers_work(line: Line) -> bool:
    """Return True if a worker's span lasts as long as its work. Stages of agent loops only hand work over."""
    return line.kind not in _NO_WORK and (line.role, line.kind) != ("agent_loop", "stage")


def _is_stage(line: Line) -> bool:
    return line.kind == "stage" or (line.kind == "timer" and line.name != "step")


def _label(lane: LaneSpans) -> str:
    role = lane.role or "process"
    if lane.replica is not None:
        return f"{role} replica {lane.replica}"
    return role if role in ("agent_loop", "trainer") else _with_rank(lane)


def _with_rank(lane: LaneSpans) -> str:
    replica = "" if lane.replica is None else f" replica {lane.replica}"
    return f"{lane.role or 'process'}{replica}" + ("" if lane.rank is None else f" rank {lane.rank}")


def _named(line: Line) -> str:
    if line.kind != "sample":
        return line.name
    ids = [
        f"{word} {line.ids[name]}" for name, word in (("sample", "prompt"), ("rollout", "rollout")) if name in line.ids
    ]
    return ", ".join(ids) or "a sample"


def _span_row(line: Line, zero_ns: int) -> SpanRow:
    return SpanRow(
        name=line.name,
        kind=line.kind,
        stage_kind=line.stage_kind,
        start_s=(line.start_ns - zero_ns) / 1e9,
        end_s=(line.end_ns - zero_ns) / 1e9,
        ids=dict(line.ids),
        error=line.error,
    )


# Ranks or replicas of a skew that a report shows.
_MAX_SKEW_ROWS = 64


class _Member(msgspec.Struct, frozen=True):
    """One rank or replica.

    Attributes:
        lane: Its lane.
        seconds: The seconds by which it is compared.
        calls: Its calls in their order.
        recorded: True if a profiler recorded during one of the calls.
    """

    lane: LaneSpans
    seconds: float
    calls: list[Interval]
    recorded: bool = False


def skews(lanes: Iterable[LaneSpans], journals: Sequence[Journal], recorded: Recorded) -> list[Skew]:
    """Compare the same stage in several ranks, and the requests of several replicas. The longest wait comes first.

    Recording slows a rank down, so recorded ranks are not judged if others were not recorded.
    """
    lanes = list(lanes)
    # A rank whose process was restarted has two lanes.
    by_stage: dict[tuple[str, str], dict[tuple[int | None, int | None], list[LaneSpans]]] = defaultdict(dict)
    for lane in lanes:
        if lane.rank is not None or lane.replica is not None:
            for stage in lane.stages:
                member = (None if lane.replica is not None else lane.rank, lane.replica)
                by_stage[lane.role, stage].setdefault(member, []).append(lane)
    found = []
    for (role, stage), by_rank in by_stage.items():
        rows = []
        for of_rank in by_rank.values():
            # Subtract the start of a profiler within the stage, which is not the rank's fault.
            calls = sorted(
                (start, end - lane.profiling.length(start, end))
                for lane in of_rank
                for start, end in lane.stages[stage]
            )
            took = sum(end - start for start, end in calls) / 1e9
            was = any(_was_recorded(lane, lane.stages[stage], journals, recorded) for lane in of_rank)
            rows.append(_Member(of_rank[-1], took, calls, was))
        found += _skew(stage, role, rows, journals)
    served = [lane for lane in lanes if lane.replica is not None and lane.requests_s]
    # A long answer or a slow tool keeps a replica busy longer, which is not its fault. Compare the time per token.
    rows = [
        _Member(lane, took, [_whole(lane)], _was_recorded(lane, [_whole(lane)], journals, recorded))
        for lane, took in zip(served, _weighed(served), strict=True)
    ]
    found += _skew("generate", "rollout", rows, journals)
    return sorted(found, key=lambda skew: -skew.waited_s)


def _was_recorded(lane: LaneSpans, calls: Iterable[Interval], journals: Sequence[Journal], recorded: Recorded) -> bool:
    times = recorded.of(journals[lane.file], lane.replica)
    return any(times.within(start, end) for start, end in calls)


def _whole(lane: LaneSpans) -> Interval:
    pieces = lane.busy.pieces() or [(0, 0)]
    return pieces[0][0], pieces[-1][1]


def _weighed(lanes: Sequence[LaneSpans]) -> list[float]:
    """Return the seconds that each replica would need for the work of the median replica.

    They are computed from its median request: seconds per token if tokens are known, else seconds.
    """
    if not lanes:
        return []
    by_token = all(lane.per_token_s for lane in lanes)
    typical = [median(lane.per_token_s if by_token else lane.requests_s) for lane in lanes]
    usual = median(typical)
    busy = median(lane.busy.length() for lane in lanes) / 1e9
    return [busy * each / usual if usual else busy for each in typical]


def _skew(stage: str, role: str, rows: list[_Member], journals: Sequence[Journal]) -> list[Skew]:
    order = sorted(rows, key=lambda row: -row.seconds)
    judged = [row for row in order if not row.recorded] if any(not row.recorded for row in order) else order
    if len(judged) < 2:
        return []
    slowest, *others = judged
    usual = median(row.seconds for row in others)
    return [
        Skew(
            stage=stage,
            role=role,
            of="rank" if slowest.lane.replica is None else "replica",
            count=len(order),
            median_s=usual,
            slowest=slowest.lane.label,
            slowest_s=slowest.seconds,
            waited_s=max(0.0, min(slowest.seconds - usual, _behind(slowest, others))),
            rows=[
                SkewRow(
                    label=row.lane.label,
                    seconds=row.seconds,
                    calls=len(row.lane.requests_s) if stage == "generate" and row.lane.requests_s else len(row.calls),
                    file=journals[row.lane.file].name,
                    recorded=row.recorded,
                )
                for row in order[:_MAX_SKEW_ROWS]
            ],
        )
    ]


def _behind(slowest: _Member, others: Sequence[_Member]) -> float:
    """Return the seconds that the others waited: the delay of the slowest one's ends after the median end.

    The delays of all calls are added if all ranks have the same number of calls; else the last ends are compared. Ends
    count because ranks wait for each other within a stage: the first to enter takes longest, and no rank waits for it.
    """
    if any(len(row.calls) != len(slowest.calls) for row in others):
        return (slowest.calls[-1][1] - median(row.calls[-1][1] for row in others)) / 1e9
    ends = [median(row.calls[place][1] for row in others) for place in range(len(slowest.calls))]
    return sum(max(0.0, end - usual) for (_, end), usual in zip(slowest.calls, ends, strict=True)) / 1e9
