"""Behaviours of spans and timers, which are not captured.

A span shows work outside of stages, or work on a single sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from autoprof.base import seam
from autoprof.behaviours.stages import NamedCall, StageKey, current_announcement, kind_of, state, wholes
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, CallPath, Path, follow
from autoprof.run import cluster
from autoprof.run.journal import Span
from autoprof.rundir.records import Id

# Kinds of spans. A `stage` span is written to the journal at once. Spans of the other kinds are written many at a time,
# because a step may have thousands of them.
Kind: TypeAlias = Literal["stage", "sample", "turn", "tool", "reward", "request"]
# Maximum length of a text in a span, in characters. Longer texts are cut.
MAX_TEXT_CHARACTERS = 120
_WHOLE_NUMBERS = range(-(1 << 63), 1 << 63)


class _SampleContext(NamedTuple):
    """Step and ids of the sample that a task works on. `off`: True if autoprof is off in the step."""

    step: int | None
    ids: Mapping[str, Id]
    off: bool = False


_sample_context: ContextVar[_SampleContext] = ContextVar("autoprof_inside", default=_SampleContext(None, {}))  # noqa: B039


class CallSpan(NamedCall):
    """Each call is one span on the timeline. The span is not captured.

    Attributes:
        whole: True if calls inside the span begin no stages. An evaluation, for example, generates and computes losses
            as the training does, but takes longer than a trace can hold.
        kind: Kind of the span. Spans inside a `sample` span get the ids and the step of the sample, also in the tasks
            that the sample starts.
        ids: Table from the name of an id to a path. The path leads from a parameter of the call to the value of the id.
            If the value is missing or false, the span does not get the id.
        otherwise: Table from the name of an id to a second path. The second path is used if the path in `ids` leads to
            no value.
        counts: Table from the name of a count to a path. The path leads from a parameter of the call to a number, or to
            a value whose length is the count. For a list of lists, the count is the sum of their lengths.
        result_counts: Table as in `counts`, with paths that begin at the result of the call. If a path is empty, the
            count is the result or its length. A number is an item of a list or tuple: `0`, `1.token_ids`. The report
            reads the counts `prompt_tokens` and `response_tokens`.
        step: Path from a parameter of the call to the number of the step, if the call has the number.
    """

    whole: bool = False
    kind: Kind = "stage"
    ids: dict[str, CallPath] = {}
    otherwise: dict[str, CallPath] = {}
    counts: dict[str, CallPath] = {}
    result_counts: dict[str, Path] = {}
    step: CallPath = ""

    def around(self, call: Call) -> Around:
        key = self.key(call)
        if key is None:
            yield CALL
            return
        surrounding = _sample_context.get()
        # Only a `stage` span may ask Ray for the step. The request, in a thread, would take longer than many calls that
        # work on a sample.
        announcement = (yield from current_announcement(call)) if self.kind == "stage" else cluster.local_announcement()
        if surrounding.off or (announcement is not None and announcement.off):
            call.on_interrupt = partial(_sample_context.set, surrounding)  # type: ignore[assignment]
            token_off = _sample_context.set(surrounding._replace(off=True))
            yield CALL
            _sample_context.reset(token_off)
            return
        step = self._step(call)
        if step is None:
            step = surrounding.step if announcement is None else announcement.step
        ids = {**surrounding.ids, **self._ids(call)} if self.ids else surrounding.ids
        span = self._begin(key, call, step, ids)
        call.on_interrupt = partial(self._drop_interrupted, span, surrounding)
        if self.kind != "stage":
            call.run.timeline.running.add(span)
        token = _sample_context.set(_SampleContext(step, ids)) if self.kind == "sample" else None
        if self.whole:
            wholes.append(span)
        outcome = yield CALL
        if self.whole:
            wholes.remove(span)
        span.end(outcome.error, self._counts_of_call(call, outcome.result))
        if token is not None:
            _sample_context.reset(token)

    def _drop_interrupted(self, span: Span, surrounding: _SampleContext) -> None:
        """Drop a span whose begin or end was interrupted, and restore the surrounding sample."""
        span.drop()
        if span in wholes:
            wholes.remove(span)
        if self.kind == "sample":
            _sample_context.set(surrounding)

    def _begin(self, key: StageKey, call: Call, step: int | None, ids: Mapping[str, Id]) -> Span:
        """Begin the span of a call."""
        rank = self.rank_of(call) if self.rank or self.kind == "stage" else None
        stage_kind = kind_of(call, key[1]) if self.kind == "stage" else None
        name = str(plain(key[1]))
        state.begun += self.kind == "stage"
        return Span(
            call.run.timeline, self.kind, name, step=step, role=key[0], rank=rank, ids=ids, stage_kind=stage_kind
        )

    def _step(self, call: Call) -> int | None:
        """Return the number of the step that the call contains, or None. Some frameworks use -1 for no step."""
        number = plain(_call_or_none(call.at, self.step, None)) if self.step else None
        return number if type(number) is int and number >= 0 else None

    def _ids(self, call: Call) -> dict[str, Id]:
        ids: dict[str, Id] = {}
        for name, path in self.ids.items():
            value = plain(_call_or_none(call.at, path, None))
            if value is None and name in self.otherwise:
                value = plain(_call_or_none(call.at, self.otherwise[name], None))
            if value is not None and value is not False:
                ids[name] = value
        return ids

    def _counts_of_call(self, call: Call, result: Any) -> dict[str, int]:
        counts: dict[str, int] = {}
        for name, path in self.counts.items():
            if (amount := _amount(_call_or_none(call.at, path, None))) is not None:
                counts[name] = amount
        for name, path in self.result_counts.items() if result is not None else ():
            if (amount := _amount(_call_or_none(follow, result, path, None) if path else result)) is not None:
                counts[name] = amount
        return counts


def plain(value: Any) -> Id | None:
    """Convert a value to a type that a span can store.

    Numbers and booleans stay unchanged, long texts are cut, and a container becomes the name of its type. Return None
    for a value that can't be converted, such as an integer of more than 64 bits.
    """
    kind = type(value)
    if kind is str:
        text: str = value
        return text if len(text) <= MAX_TEXT_CHARACTERS else text[:MAX_TEXT_CHARACTERS]
    if kind is int:
        return int(value) if value in _WHOLE_NUMBERS else None
    if kind is bool or kind is float or value is None:
        return value  # type: ignore[no-any-return]
    return _call_or_none(_as_id, value)  # type: ignore[no-any-return]


def _as_id(value: Any) -> Id | None:
    """Convert an object of the user's class to a type that a span can store, or return None."""
    if getattr(value, "ndim", None) == 0 and getattr(getattr(value, "device", "cpu"), "type", "cpu") == "cpu":
        # A numpy scalar or a scalar tensor. Reading a tensor of another device would block.
        scalar = value.item()
        return plain(scalar) if type(scalar) in (str, int, bool, float) else None
    if hasattr(value, "__len__") and not isinstance(value, str):
        return type(value).__name__
    return str(value)[:MAX_TEXT_CHARACTERS]


def _amount(value: Any) -> int | None:
    if value is None or isinstance(value, int):
        return value
    is_nested = type(value) is list and value and type(value[0]) is list
    length = _call_or_none(lambda: sum(map(len, value)) if is_nested else len(value))
    number = plain(value) if length is None else length
    return number if type(number) is int else None


def _call_or_none(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that runs code of the user's classes. Return the result, or None after any exception."""
    return seam.attempt(function, *args)[0]


# Attribute of a running timer that holds its span, and the number of the step in which the timer started, or None.
_SPAN = "_autoprof_span"


class TimerStart(Behaviour):
    """The call starts a timer, which a `timer.stop` hook stops. Timers may nest and overlap.

    A timer is a span of the step in which the timer starts. If no step is open at the start, the timer is a span of the
    step in which the timer stops. If no step is open at the start and at the stop, as in processes without a trainer,
    the timer is ignored.

    Attributes:
        of: Path from a parameter of the call to the timer.
        timer: Path from a parameter of the call to the timer's name. Timers without a name are ignored.
        role: Role of the timed work.
    """

    makes_stages: ClassVar[bool] = True
    of: CallPath = "self"
    timer: CallPath = "self.name"
    role: str = "trainer"

    def around(self, call: Call) -> Around:
        _, announcement = cluster.own_announcement()
        name = None if announcement is not None and announcement.off else call.at(self.timer, None)
        yield CALL
        if name:
            step = None if announcement is None else announcement.step
            name = str(plain(name))
            kind = kind_of(call, name)
            span = Span(call.run.timeline, "timer", name, step=step, role=self.role, rank=None, stage_kind=kind)
            setattr(call.at(self.of), _SPAN, (span, step))
            call.run.timeline.running.add(span)


class TimerStop(Behaviour):
    """The call stops a timer that a `timer.start` hook started.

    Attributes:
        of: Path from a parameter of the call to the timer.
    """

    of: CallPath = "self"

    def around(self, call: Call) -> Around:
        timer: Any = call.at(self.of)
        started: tuple[Span, int | None] | None = vars(timer).pop(_SPAN, None)
        if started is None:
            yield CALL
            return
        span, step = started
        call.on_interrupt = span.drop
        outcome = yield CALL
        _, announcement = cluster.own_announcement()
        if step is None and announcement is not None and not announcement.off:
            step = announcement.step
        if step is None:
            span.drop()
        else:
            span.end(outcome.error, step=step)
