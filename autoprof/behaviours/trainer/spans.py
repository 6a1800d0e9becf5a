"""Behaviours of spans, which are not captured: work beside stages, and work on single samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

from autoprof.base import seam
from autoprof.behaviours.trainer.running import wholes
from autoprof.behaviours.trainer.stages import NamedCall, current_announcement, kind_of
from autoprof.hooks.behaviour import CALL, Around, Call, CallPath, Path, follow
from autoprof.run import runtime, step_announcement
from autoprof.run.runtime import Runtime
from autoprof.run.timeline import Span as TimelineSpan
from autoprof.rundir.records import Id

# Kinds of spans. A `stage` span is written at once; the other kinds are batched, since a step may have thousands.
Kind: TypeAlias = Literal["stage", "sample", "turn", "tool", "reward", "request"]
# Characters of a text in a span. Longer texts are cut.
MAX_TEXT_CHARACTERS = 120
_WHOLE_NUMBERS = range(-(1 << 63), 1 << 63)


class _SampleContext(NamedTuple):
    """Step and ids of the sample that a task works on. `off`: autoprof is off in the step."""

    step: int | None
    ids: Mapping[str, Id]
    off: bool = False


_sample_context: ContextVar[_SampleContext] = ContextVar("autoprof_inside", default=_SampleContext(None, {}))  # noqa: B039


class CallSpan(NamedCall):
    """One call is a span of the timeline, and is not captured.

    Attributes:
        whole: True if calls inside the span are no stages of the step. An evaluation, for example, generates and
            computes losses as training does, but takes longer than a trace can hold.
        kind: Kind of the span. Spans inside a `sample` get its ids and its step, also in tasks that it starts.
        ids: Ids of the span: names, and paths from a parameter of the call to their values. A missing or false value is
            omitted.
        otherwise: Paths to values of ids that `ids` does not find.
        counts: Counts of the span: names, and paths to numbers, or to values whose length is counted.
        result_counts: Counts whose paths begin at the call's result. An empty path is the result itself.
        step: Path to the number of the step, if the call has it.
    """

    whole: bool = False
    kind: Kind = "stage"
    ids: dict[str, CallPath] = {}
    otherwise: dict[str, CallPath] = {}
    counts: dict[str, CallPath] = {}
    result_counts: dict[str, Path] = {}
    step: CallPath = ""

    def around(self, call: Call) -> Around:
        run, key = runtime.current(), self.key(call)
        if run is None or key is None:
            yield CALL
            return None
        inside = _sample_context.get()
        # Asking Ray for the step, in a thread, would take longer than many calls for a sample.
        announcement = (
            (yield from current_announcement(run, call)) if self.kind == "stage" else step_announcement.here()
        )
        if inside.off or (announcement is not None and announcement.off):
            call.on_interrupt = partial(_sample_context.set, inside)  # type: ignore[assignment]
            token_off = _sample_context.set(inside._replace(off=True))
            yield CALL
            _sample_context.reset(token_off)
            return None
        step = self._step(call)
        if step is None:
            step = inside.step if announcement is None else announcement.step
        ids = {**inside.ids, **self._ids(call)} if self.ids else inside.ids
        span = self._begin(run, key, call, step, ids)
        call.on_interrupt = partial(self._leave, span, inside)
        if self.kind != "stage":
            run.timeline.running.add(span)
        token = _sample_context.set(_SampleContext(step, ids)) if self.kind == "sample" else None
        if self.whole:
            wholes.append(span)
        outcome = yield CALL
        if self.whole:
            wholes.remove(span)
        span.end(outcome.error, self._counted(call, outcome.result))
        if token is not None:
            _sample_context.reset(token)
        return None

    def _leave(self, span: TimelineSpan, inside: _SampleContext) -> None:
        """Undo a span whose begin or end was interrupted."""
        span.drop()
        if span in wholes:
            wholes.remove(span)
        if self.kind == "sample":
            _sample_context.set(inside)

    def _begin(
        self, run: Runtime, key: tuple[str, str], call: Call, step: int | None, ids: Mapping[str, Id]
    ) -> TimelineSpan:
        rank = self.rank_of(call) if self.rank or self.kind == "stage" else None
        stage_kind = kind_of(call, key[1]) if self.kind == "stage" else None
        return TimelineSpan(
            run.timeline,
            self.kind,
            str(plain(key[1])),
            step=step,
            role=key[0],
            rank=rank,
            ids=ids,
            stage_kind=stage_kind,
        )

    def _step(self, call: Call) -> int | None:
        """Return the step's number from the call, or None. Some frameworks use -1 for no step."""
        number = plain(_asked(call.at, self.step, None)) if self.step else None
        return number if type(number) is int and number >= 0 else None

    def _ids(self, call: Call) -> dict[str, Id]:
        ids: dict[str, Id] = {}
        for name, path in self.ids.items():
            value = plain(_asked(call.at, path, None))
            if value is None and name in self.otherwise:
                value = plain(_asked(call.at, self.otherwise[name], None))
            if value is not None and value is not False:
                ids[name] = value
        return ids

    def _counted(self, call: Call, result: Any) -> dict[str, int]:
        counts: dict[str, int] = {}
        for name, path in self.counts.items():
            if (amount := _amount(_asked(call.at, path, None))) is not None:
                counts[name] = amount
        for name, path in self.result_counts.items() if result is not None else ():
            if (amount := _amount(_asked(follow, result, path, None) if path else result)) is not None:
                counts[name] = amount
        return counts


def plain(value: Any) -> Id | None:
    """Return a value as a span can hold it: a number, a text (cut if long), or the type name of a container."""
    kind = type(value)
    if kind is str:
        text: str = value
        return text if len(text) <= MAX_TEXT_CHARACTERS else text[:MAX_TEXT_CHARACTERS]
    if kind is int:
        return int(value) if value in _WHOLE_NUMBERS else None
    if kind is bool or kind is float or value is None:
        return value  # type: ignore[no-any-return]
    return _asked(_shortened, value)  # type: ignore[no-any-return]


def _shortened(value: Any) -> Id | None:
    """Return an object of the user as a span can hold it."""
    if getattr(value, "ndim", None) == 0 and getattr(getattr(value, "device", "cpu"), "type", "cpu") == "cpu":
        # A numpy scalar or a scalar tensor. Reading a tensor of another device would block.
        single = value.item()
        return plain(single) if type(single) in (str, int, bool, float) else None
    if hasattr(value, "__len__") and not isinstance(value, str):
        return type(value).__name__
    return str(value)[:MAX_TEXT_CHARACTERS]


def _amount(value: Any) -> int | None:
    if value is None or isinstance(value, int):
        return value
    length = _asked(len, value)
    number = plain(value) if length is None else length
    return number if type(number) is int else None


def _asked(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that runs code of the user's classes, which may raise anything: then return None."""
    try:
        return function(*args)
    except Exception as error:
        seam.pass_on(error)
        return None
