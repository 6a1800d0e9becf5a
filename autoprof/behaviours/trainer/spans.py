"""Spans that are not captured: work beside stages, and work on single samples."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

from autoprof.base import interrupts
from autoprof.behaviours.trainer.running import wholes
from autoprof.behaviours.trainer.stages import Named, kind_of, posted
from autoprof.hooks.behaviour import CALL, Around, Call, CallPath, Path, follow
from autoprof.run import runtime, step_announcement
from autoprof.run.runtime import Runtime
from autoprof.run.timeline import Span as TimelineSpan
from autoprof.rundir.records import Id

# `stage` spans tell of a process's work and are written at once; of the others there are thousands in a step.
Kind: TypeAlias = Literal["stage", "sample", "turn", "tool", "reward", "request"]
# Texts are cut to so many characters.
_LONGEST = 120
_WHOLE_NUMBERS = range(-(1 << 63), 1 << 63)


class _Inside(NamedTuple):
    """The sample that a task is working on. `off`: autoprof does nothing at all in the step."""

    step: int | None
    ids: Mapping[str, Id]
    off: bool = False


_inside: ContextVar[_Inside] = ContextVar("autoprof_inside", default=_Inside(None, {}))  # noqa: B039


class Span(Named):
    """One call is a span of the timeline, and is not captured.

    Attributes:
        whole: Whether nothing inside of it is a stage of the step: an evaluation generates and computes losses as
            training does, for longer than a trace could hold.
        kind: What it is a span of. What is called inside of a `sample`, in tasks that it starts too, has its ids and
            its step.
        ids: Which of many it is: names, and paths from a parameter of the call to their values. What is not there, or
            false, is left out.
        otherwise: Paths to the values of ids that are not there by `ids`.
        counts: Names, and paths to numbers, or to what has a length, which is counted.
        result_counts: The same with paths that begin at what the call returns; empty for that itself.
        step: Path to the number of the step, where the call knows it.
    """

    whole: bool = False
    kind: Kind = "stage"
    ids: dict[str, CallPath] = {}
    otherwise: dict[str, CallPath] = {}
    counts: dict[str, CallPath] = {}
    result_counts: dict[str, Path] = {}
    step: CallPath = ""

    def around(self, call: Call) -> Around:
        run, who = runtime.current(), self.who(call)
        if run is None or who is None:
            yield CALL
            return None
        inside = _inside.get()
        # A thread that asks Ray for the step would take longer than many a call for a sample.
        posting = (yield from posted(run, call)) if self.kind == "stage" else step_announcement.here()
        if inside.off or (posting is not None and posting.off):
            try:
                left_alone = _inside.set(inside._replace(off=True))
                yield CALL
                _inside.reset(left_alone)
            except BaseException as error:
                interrupts.undo(error, partial(_inside.set, inside))  # type: ignore[arg-type]
                raise
            return None
        step = self._step(call)
        if step is None:
            step = inside.step if posting is None else posting.step
        ids = {**inside.ids, **self._ids(call)} if self.ids else inside.ids
        span = self._begin(run, who, call, step, ids)
        try:
            if self.kind != "stage":
                run.timeline.running.add(span)
            token = _inside.set(_Inside(step, ids)) if self.kind == "sample" else None
            if self.whole:
                wholes.append(span)
            outcome = yield CALL
            if self.whole:
                wholes.remove(span)
            span.end(outcome.error, self._counted(call, outcome.result))
            if token is not None:
                _inside.reset(token)
        except BaseException as error:
            interrupts.undo(error, partial(self._leave, span, inside))
            raise
        return None

    def _leave(self, span: TimelineSpan, inside: _Inside) -> None:
        """Leave a span that was interrupted as it began or ended."""
        span.drop()
        if span in wholes:
            wholes.remove(span)
        if self.kind == "sample":
            _inside.set(inside)

    def _begin(
        self, run: Runtime, who: tuple[str, str], call: Call, step: int | None, ids: Mapping[str, Id]
    ) -> TimelineSpan:
        rank = self.rank_of(call) if self.rank or self.kind == "stage" else None
        stage_kind = kind_of(call, who[1]) if self.kind == "stage" else None
        return TimelineSpan(
            run.timeline,
            self.kind,
            str(plain(who[1])),
            step=step,
            role=who[0],
            rank=rank,
            ids=ids,
            stage_kind=stage_kind,
        )

    def _step(self, call: Call) -> int | None:
        """Return the step's number as the call says it; frameworks say -1 for none."""
        number = plain(_at(call, self.step)) if self.step else None
        return number if type(number) is int and number >= 0 else None

    def _ids(self, call: Call) -> dict[str, Id]:
        found: dict[str, Id] = {}
        for name, path in self.ids.items():
            value = plain(_at(call, path))
            if value is None and name in self.otherwise:
                value = plain(_at(call, self.otherwise[name]))
            if value is not None and value is not False:
                found[name] = value
        return found

    def _counted(self, call: Call, result: Any) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, path in self.counts.items():
            if (amount := _amount(_at(call, path))) is not None:
                found[name] = amount
        for name, path in self.result_counts.items() if result is not None else ():
            if (amount := _amount(_follow(result, path))) is not None:
                found[name] = amount
        return found


def plain(value: Any) -> Id | None:
    """Return a value as a line may hold it: numbers and texts, cut where they are long; containers are only named."""
    kind = type(value)
    if kind is str:
        text: str = value
        return text if len(text) <= _LONGEST else text[:_LONGEST]
    if kind is int:
        return int(value) if value in _WHOLE_NUMBERS else None
    if kind is bool or kind is float or value is None:
        return value  # type: ignore[no-any-return]
    try:
        if getattr(value, "ndim", None) == 0 and getattr(getattr(value, "device", "cpu"), "type", "cpu") == "cpu":
            # A number of numpy's, or a tensor that is one. That of another device would have to be waited for.
            single = value.item()
            return plain(single) if type(single) in (str, int, bool, float) else None
        if hasattr(value, "__len__") and not isinstance(value, str):
            return kind.__name__
        return str(value)[:_LONGEST]
    except Exception as error:  # of the user's class
        interrupts.pass_on(error)
        return None


def _amount(value: Any) -> int | None:
    if value is None or isinstance(value, int):
        return value
    try:
        return len(value)
    except Exception as error:
        interrupts.pass_on(error)
        number = plain(value)
        return number if type(number) is int else None


def _at(call: Call, path: str) -> Any:
    try:
        return call.at(path, None)
    except Exception as error:  # of a property of the user's
        interrupts.pass_on(error)
        return None


def _follow(root: Any, path: str) -> Any:
    try:
        return follow(root, path, None) if path else root
    except Exception as error:
        interrupts.pass_on(error)
        return None
