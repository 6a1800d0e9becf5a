"""Lanes of a step: the spans of each process. Gaps in which all workers are idle, and ranks slower than other ranks."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from autoprof.base.intervals import Interval, Union, segments
from autoprof.config.values import role_place
from autoprof.report import model
from autoprof.report.model import OTHER, PROFILING, Gap, Lane, PathPart, Skew, SkewRow, SpanRow
from autoprof.report.overview import MAX_OWN_SHARE, Recorded
from autoprof.report.samples import sample_label
from autoprof.report.timeline import StepSpan
from autoprof.rundir.journal import Journal
from autoprof.rundir.records import Line

# Maximum number of spans of a lane that are kept. The longest spans are kept. A plot can't show more.
_MAX_SPANS = 500
# Kinds of spans that are not work: the window of a capture, the step itself, autoprof's own time.
_NO_WORK = ("window", "step", PROFILING)
# Share of a stage by which a rank must end later than the other ranks, to be the rank for which they waited.
_CLEARLY_LATER = 0.1
# Shortest gap in the work of all workers that is shown.
_MIN_GAP_NS = 50_000_000

# Maximum number of lanes that a report shows. With more lanes, the plot would be unreadable.
MAX_LANES = 96


class LaneSpans:
    """Spans of one process under one role in one step, and sums of these spans.

    Attributes:
        file: The number of the process's journal.
        role: The role of the spans, such as `actor`.
        replica: The number of the replica; None if the spans belong to no replica.
        rank: The rank; None if it is unknown.
        label: The label of the lane. `Lanes.finish` sets it.
        busy: The times in which the process worked.
        profiling: The times of autoprof's own spans in the process.
        worked: True if the lane has spans other than autoprof's own.
        count: The number of spans. Turns, tools and rewards do not count.
        stages: Dict from the name of each stage to the (start, end) of its calls in this step.
        requests_s: The seconds of each request to an engine.
        per_token_s: The seconds per generated token of each request.
    """

    def __init__(self, file: int, role: str, replica: int | None) -> None:
        self.file, self.role, self.replica = file, role, replica
        self.rank: int | None = None
        self.label = ""
        self.busy = Union()
        self.profiling = Union()
        self.worked = False
        self.count = 0
        # A heap of (length, number, span), the shortest span first. If two spans have the same length, their numbers
        # are compared. So spans are never compared.
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
        entry = (line.end_ns - line.start_ns, self.count, line)
        if len(self._longest) < _MAX_SPANS:
            heapq.heappush(self._longest, entry)
        else:
            heapq.heappushpop(self._longest, entry)
        if line.kind == "request":
            request_s = (line.end_ns - line.start_ns) / 1e9
            self.requests_s.append(request_s)
            if (tokens := line.counts.get("response_tokens") or 0) >= 1:
                self.per_token_s.append(request_s / tokens)

    def spans(self) -> list[Line]:
        """Return the longest spans of the lane, ordered by start."""
        return sorted((line for _, _, line in self._longest), key=lambda line: (line.start_ns, -line.end_ns))

    def row(self, journal: Journal, start_ns: int, end_ns: int) -> Lane:
        """Return the lane as the report shows it, for a step from `start_ns` to `end_ns`."""
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
    """Lanes of one step.

    Attributes:
        lanes: The lanes in the order in which the report shows them. `finish` sets it.
    """

    def __init__(self, journals: Sequence[Journal], step: StepSpan) -> None:
        """Create the lanes of a step that has no spans yet.

        Args:
            journals: The journals of the run.
            step: The span of the step.
        """
        self._journals = journals
        self._driver = step.file
        self._start, self._end = step.start_ns, step.end_ns
        self._by_key: dict[tuple[int, str, int | None], LaneSpans] = {}
        self.lanes: list[LaneSpans] = []
        self._workers: list[LaneSpans] = []
        self._own_lanes: list[LaneSpans] = []
        self._driver_stages: list[Line] = []

    def add(self, file: int, line: Line, own: bool) -> None:
        """Add a span to the lane of its process, role and replica.

        Args:
            file: The number of the journal that contains the span.
            line: The span.
            own: True if the span belongs to this step, False if it belongs to another step that runs at the same time.
        """
        replica = line.ids.get("replica")
        key = (file, line.role, replica if isinstance(replica, int) else None)
        if (lane := self._by_key.get(key)) is None:
            lane = self._by_key[key] = LaneSpans(*key)
        if lane.rank is None:
            lane.rank = line.rank
        lane.add(line)
        if own and line.kind == "stage":
            lane.stages[line.name].append((line.start_ns, line.end_ns))

    def finish(self) -> None:
        """Order the lanes, and give each lane a label. Call this method after all spans were added."""
        # Skip the workers of an engine: their lanes contain only autoprof's own time. The lane of the replica's server
        # contains the work.
        self.lanes = sorted((lane for lane in self._by_key.values() if lane.worked), key=self._order)
        for name in (_label, _name_with_rank, self._with_process):
            label_counts = Counter(lane.label or name(lane) for lane in self.lanes)
            for lane in self.lanes:
                if not lane.label and label_counts[name(lane)] == 1:
                    lane.label = name(lane)
        loops = [lane for lane in self.lanes if lane.role == "agent_loop"]
        for number, lane in enumerate(loops if len(loops) > 1 else []):
            lane.label = f"agent_loop {number}"
        # A driver that is one of several ranks, as under torchrun, works like the other ranks.
        other_roles = {lane.role for lane in self.lanes if lane.file != self._driver and lane.rank is not None}
        self._own_lanes = [
            lane
            for lane in self.lanes
            if lane.file == self._driver and lane.rank is not None and lane.role in other_roles
        ]
        self._workers = [lane for lane in self.lanes if lane.file != self._driver or lane in self._own_lanes]
        self._driver_stages = [
            line
            for lane in self.lanes
            if lane.file == self._driver
            for line in lane.spans()
            if line.kind == "stage" or (line.kind == "timer" and line.name != "step")
        ]

    def _with_process(self, lane: LaneSpans) -> str:
        journal = self._journals[lane.file]
        return f"{_name_with_rank(lane)} on {journal.host}, pid {journal.pid}"

    def _order(self, lane: LaneSpans) -> tuple[int, str, int, int, str, int]:
        journal = self._journals[lane.file]
        numbers = (-1 if lane.replica is None else lane.replica, -1 if lane.rank is None else lane.rank)
        return role_place(lane.role), lane.role, *numbers, journal.host, journal.pid

    def shown(self) -> list[LaneSpans]:
        """Return the lanes that the report shows.

        If there are more than `MAX_LANES`, these are the busiest and the idlest lanes of each role.
        """
        if len(self.lanes) <= MAX_LANES:
            return self.lanes
        roles: dict[str, list[LaneSpans]] = defaultdict(list)
        for lane in sorted(self.lanes, key=lambda lane: lane.busy.length(self._start, self._end)):
            roles[lane.role].append(lane)
        max_per_end = max(1, MAX_LANES // len(roles) // 2)
        kept_ids = {
            id(lane) for of_role in roles.values() for lane in (*of_role[:max_per_end], *of_role[-max_per_end:])
        }
        return [lane for lane in self.lanes if id(lane) in kept_ids]

    def gaps(self) -> list[Gap]:
        """Return the times in which all workers of the driver were idle.

        Two kinds of time are left out: times in which the driver waits for work that no worker records as a span, such
        as the work of an engine without hooks; and autoprof's own time in any process.
        """
        working_times = Union(piece for lane in self._workers for piece in lane.busy.within(self._start, self._end))
        pieces = working_times.pieces()
        recorded_meanings = {
            model.meaning(line.name, line.kind, line.stage_kind)
            for lane in self._workers
            for line in lane.spans()
            # Stages of agent loops hand their work over, so they do not last as long as the work.
            if line.kind not in _NO_WORK and (line.role, line.kind) != ("agent_loop", "stage")
        }
        driver_meanings = [model.meaning(line.name, stage_kind=line.stage_kind) for line in self._driver_stages]
        has_loops = any(lane.role == "agent_loop" for lane in self._workers)
        if not pieces or (has_loops and model.GENERATION not in recorded_meanings.union(driver_meanings)):
            return []
        explained_meanings = recorded_meanings | {model.SCORING, model.TRAINING, OTHER}
        unrecorded_times = Union(
            (line.start_ns, line.end_ns)
            for line, meaning in zip(self._driver_stages, driver_meanings, strict=True)
            if meaning not in explained_meanings
        )
        for lane in self._by_key.values():
            for start, end in lane.profiling.pieces():
                unrecorded_times.add(start, end)
        return [
            self._gap(low, high, start, end)
            for start, end in working_times.without(pieces[0][0], pieces[-1][1])
            for low, high in unrecorded_times.without(start, end)
            if high - low >= _MIN_GAP_NS
        ]

    def _gap(self, low: int, high: int, start: int, end: int) -> Gap:
        """Return the gap from `low` to `high`. All workers were idle from `start` to `end`, which contains the gap."""
        span_before, span_after = _edge(self._workers, start, 1), _edge(self._workers, end, 0)
        owners = segments([(line.name, line.start_ns, line.end_ns) for line in self._driver_stages], low, high)
        longest_owner = max(owners, key=lambda owner: owner[2] - owner[1], default=(OTHER, low, low))
        covered_ns = sum(owner[2] - owner[1] for owner in owners)
        is_between = span_before[1] == model.GENERATION and span_after[1] in (model.SCORING, model.TRAINING)
        return Gap(
            start_s=(low - self._start) / 1e9,
            end_s=(high - self._start) / 1e9,
            after=span_before[0],
            before=span_after[0],
            between="generation and training" if is_between else "stages",
            within=longest_owner[0] if 2 * covered_ns >= high - low else OTHER,
        )

    def path(self) -> list[PathPart]:
        """Return the driver's stages and `OTHER`, ordered by start, each with the worker's span for which it waited."""
        timers = [line for line in self._driver_stages if line.kind == "timer"]
        driver_spans = [(line.name, line.start_ns, line.end_ns) for line in timers or self._driver_stages]
        # The driver also waits outside of its stages.
        driver_spans.append((OTHER, self._start, self._end))
        spans = [(line, lane) for lane in self._workers for line in lane.spans() if line.kind in ("stage", "sample")]
        path = []
        for name, start, end in segments(driver_spans, self._start, self._end):
            if (end - start) * 100 < self._end - self._start:
                continue
            line, lane = self._holder(spans, name, start, end)
            path.append(
                PathPart(
                    stage=name,
                    start_s=(start - self._start) / 1e9,
                    end_s=(end - self._start) / 1e9,
                    held_by=f"{_named(line)} of {lane.label}" if line and lane else None,
                )
            )
        return path

    def _holder(
        self, spans: Sequence[tuple[Line, LaneSpans]], stage: str, start: int, end: int
    ) -> tuple[Line | None, LaneSpans | None]:
        """Return the worker's span for which a stage of the driver waited, and the lane of the span.

        This is the span that ended last in the stage. If the driver is one of several ranks, all ranks end a stage with
        collectives at the same time. So a rank that was still in an earlier stage comes first. If no rank ended clearly
        later than the others, return (None, None).
        """
        ended = [each for each in spans if start < each[0].end_ns <= end]
        if not self._own_lanes:
            return max(ended, key=lambda each: each[0].end_ns, default=(None, None))
        least_ns = _CLEARLY_LATER * (end - start)
        late = [each for each in ended if each[0].name != stage and each[0].start_ns < start]
        line, lane = max(late, key=lambda each: each[0].end_ns, default=(None, None))
        if line is not None and line.end_ns - start >= least_ns:
            return line, lane
        same = [each for each in spans if each[0].name == stage and each[0].start_ns < end and each[0].end_ns > start]
        same.sort(key=lambda each: each[0].end_ns)
        earlier_end = same[-2][0].end_ns if len(same) > 1 else start
        if same and earlier_end + least_ns <= same[-1][0].end_ns <= end:
            return same[-1]
        return None, None


def _edge(lanes: Iterable[LaneSpans], at: int, side: int) -> tuple[str, str]:
    """Return a text that names the worker's span at the edge of a gap, and the meaning of this span.

    Args:
        lanes: The lanes of the workers.
        at: The time of the edge.
        side: 1 for the span that ends at this time, 0 for the span that begins at this time.
    """
    for lane in lanes:
        if not any(piece[side] == at for piece in lane.busy.pieces()):
            continue
        for line in lane.spans():
            if (line.start_ns, line.end_ns)[side] == at and line.kind not in _NO_WORK:
                return f"{_named(line)} of {lane.label}", model.meaning(line.name, line.kind, line.stage_kind)
        return lane.label, model.GENERATION if lane.role in ("rollout", "agent_loop") else OTHER
    return OTHER, OTHER


def _label(lane: LaneSpans) -> str:
    role = lane.role or "process"
    if lane.replica is not None:
        return f"{role} replica {lane.replica}"
    return role if role in ("agent_loop", "trainer") else _name_with_rank(lane)


def _name_with_rank(lane: LaneSpans) -> str:
    replica = "" if lane.replica is None else f" replica {lane.replica}"
    return f"{lane.role or 'process'}{replica}" + ("" if lane.rank is None else f" rank {lane.rank}")


def _named(line: Line) -> str:
    return sample_label(line.ids, line.name) if line.kind == "sample" else line.name


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


# Maximum number of ranks or replicas of a skew that a report shows.
_MAX_SKEW_ROWS = 64


class _Member(msgspec.Struct, frozen=True):
    """One rank or replica that is compared with the other ranks or replicas.

    Attributes:
        lane: The lane of the rank or replica.
        seconds: The seconds that are compared.
        calls: The start and the end of each call of the stage, ordered by start.
        recorded: True if a profiler recorded during at least one call.
        in_autoprof: True if autoprof's own time, in any process, is over a fifth of the calls. Such a rank or replica
            is not judged.
    """

    lane: LaneSpans
    seconds: float
    calls: list[Interval]
    recorded: bool = False
    in_autoprof: bool = False


def skews(lanes: Sequence[LaneSpans], journals: Sequence[Journal], recorded: Recorded, profiling: Union) -> list[Skew]:
    """Compare ranks that ran the same stage, and replicas that served requests.

    Recording slows a rank down. So if only some ranks were recorded, the recorded ranks are not judged. While autoprof
    starts, stops or exports a recording in one rank, the other ranks may wait for this rank. So the times are measured
    on a clock that stands still in these times.

    Args:
        lanes: The lanes of the step.
        journals: The journals of the run.
        recorded: The times in which profilers recorded.
        profiling: The times in which autoprof delayed the run.

    Returns:
        The comparisons. The comparison with the longest wait comes first.
    """
    # If the process of a rank was restarted, the rank has two lanes.
    by_stage: dict[tuple[str, str], dict[tuple[int | None, int | None], list[LaneSpans]]] = defaultdict(dict)
    for lane in lanes:
        if lane.rank is not None or lane.replica is not None:
            for stage in lane.stages:
                member = (None if lane.replica is not None else lane.rank, lane.replica)
                by_stage[lane.role, stage].setdefault(member, []).append(lane)
    skews_found = []
    for (role, stage), by_rank in by_stage.items():
        rows = []
        for of_rank in by_rank.values():
            whole_calls = sorted(call for lane in of_rank for call in lane.stages[stage])
            calls = _without(whole_calls, profiling)
            length, whole_length = (sum(end - start for start, end in each) for each in (calls, whole_calls))
            was_recorded = any(_was_recorded(lane, lane.stages[stage], journals, recorded) for lane in of_rank)
            in_autoprof = whole_length - length > MAX_OWN_SHARE * whole_length
            rows.append(_Member(of_rank[-1], length / 1e9, calls, was_recorded, in_autoprof))
        skews_found += _skews(stage, role, rows, journals)
    replica_lanes = [lane for lane in lanes if lane.replica is not None and lane.requests_s]
    # Compare the time per token: a long answer or a slow tool keeps a replica busy longer, but does not mean that the
    # replica is slow.
    rows = []
    for lane, seconds in zip(replica_lanes, _seconds_for_median_work(replica_lanes), strict=True):
        start, end = _interval_of_span(lane)
        was_recorded = _was_recorded(lane, [(start, end)], journals, recorded)
        in_autoprof = profiling.length(start, end) > MAX_OWN_SHARE * (end - start)
        rows.append(_Member(lane, seconds, _without([(start, end)], profiling), was_recorded, in_autoprof))
    skews_found += _skews("generate", "rollout", rows, journals)
    return sorted(skews_found, key=lambda skew: -skew.waited_s)


def _without(calls: Iterable[Interval], profiling: Union) -> list[Interval]:
    """Return the calls on a clock that stands still in the times `profiling`. The calls must be ordered by start."""
    pieces = profiling.pieces()
    if not pieces:
        return list(calls)
    return [
        (start - profiling.length(pieces[0][0], start), end - profiling.length(pieces[0][0], end))
        for start, end in calls
    ]


def _was_recorded(lane: LaneSpans, calls: Iterable[Interval], journals: Sequence[Journal], recorded: Recorded) -> bool:
    times = recorded.recorded_times(journals[lane.file], lane.replica)
    return any(times.within(start, end) for start, end in calls)


def _interval_of_span(lane: LaneSpans) -> Interval:
    pieces = lane.busy.pieces() or [(0, 0)]
    return pieces[0][0], pieces[-1][1]


def _seconds_for_median_work(lanes: Sequence[LaneSpans]) -> list[float]:
    """Return for each replica the seconds that it would need for the work of the median replica.

    The seconds are computed from the median request of the replica. Its seconds per token are compared if the tokens of
    all replicas are known, else its seconds.
    """
    if not lanes:
        return []
    by_token = all(lane.per_token_s for lane in lanes)
    median_requests = [median(lane.per_token_s if by_token else lane.requests_s) for lane in lanes]
    median_of_replicas = median(median_requests)
    busy_s = median(lane.busy.length() for lane in lanes) / 1e9
    return [busy_s * each / median_of_replicas if median_of_replicas else busy_s for each in median_requests]


def _skews(stage: str, role: str, rows: list[_Member], journals: Sequence[Journal]) -> list[Skew]:
    """Compare the slowest rank or replica of a stage with the median of the others. Return at most one skew."""
    ordered_rows = sorted(rows, key=lambda row: -row.seconds)
    comparable_rows = [row for row in ordered_rows if not row.in_autoprof]
    judged_rows = [row for row in comparable_rows if not row.recorded] or comparable_rows
    if len(judged_rows) < 2:
        return []
    slowest, *others = judged_rows
    median_s = median(row.seconds for row in others)
    return [
        Skew(
            stage=stage,
            role=role,
            of="rank" if slowest.lane.replica is None else "replica",
            count=len(ordered_rows),
            median_s=median_s,
            slowest=slowest.lane.label,
            slowest_s=slowest.seconds,
            waited_s=max(0.0, min(slowest.seconds - median_s, _waited_for_slowest_s(slowest, others))),
            rows=[
                SkewRow(
                    label=row.lane.label,
                    seconds=row.seconds,
                    calls=len(row.lane.requests_s) if stage == "generate" and row.lane.requests_s else len(row.calls),
                    file=journals[row.lane.file].name,
                    recorded=row.recorded,
                )
                for row in ordered_rows[:_MAX_SKEW_ROWS]
            ],
        )
    ]


def _waited_for_slowest_s(slowest: _Member, others: Sequence[_Member]) -> float:
    """Return the seconds for which the other ranks waited for the slowest rank.

    For each call, these are the seconds from the median end of the other ranks to the end of the slowest rank. If all
    ranks have the same number of calls, the seconds of all calls are added. Otherwise only the last calls are compared.
    Ends are compared, not durations: ranks wait for each other within a stage, so the rank that enters first takes
    longest, but no rank waits for it.
    """
    if any(len(row.calls) != len(slowest.calls) for row in others):
        return (slowest.calls[-1][1] - median(row.calls[-1][1] for row in others)) / 1e9
    median_ends = [median(row.calls[place][1] for row in others) for place in range(len(slowest.calls))]
    return (
        sum(max(0.0, end - median_end) for (_, end), median_end in zip(slowest.calls, median_ends, strict=True)) / 1e9
    )
