"""Ranges that are open when a recording ends."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.support.captures import begun, finished, torch, work

pytestmark = pytest.mark.needs("torch")


def entered(name: str) -> Any:
    """Begin a range, and an operator in it."""
    found = torch.profiler.record_function(name)
    found.__enter__()
    work()
    return found


def spans(trace: dict[str, Any], *names: str) -> list[tuple[float, float]]:
    """Return the start and the end of the ranges, in the order of the names."""
    found = {
        event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in trace["traceEvents"] if "dur" in event
    }
    return [found[name] for name in names]


def test_a_range_open_at_the_end_of_a_capture_ends_with_it(made: Any, capfd: pytest.CaptureFixture[str]) -> None:
    run = made()
    recording = begun(run)
    outer, inner = entered("outer"), entered("inner")
    recording.stop()
    ((_, trace),) = finished(run).values()
    (outer_begin, outer_end), (inner_begin, inner_end) = spans(trace, "outer", "inner")
    assert outer_begin < inner_begin < inner_end <= outer_end
    # torch writes a warning with the name of each range that has no end.
    assert "inner" not in capfd.readouterr().err
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)


def test_a_range_that_autoprof_begins_ends_with_the_capture(made: Any, capfd: pytest.CaptureFixture[str]) -> None:
    run = made()
    recording = begun(run)
    end_range = recording.mark("mini_batch 1")
    recording.stop()
    assert "mini_batch" not in capfd.readouterr().err
    end_range()


def test_record_function_is_torchs_own_outside_of_captures(made: Any) -> None:
    kind = torch.profiler.record_function
    before = vars(kind)["__enter__"]
    recording = begun(made())
    assert vars(kind)["__enter__"] is not before
    recording.stop()
    assert vars(kind)["__enter__"] is before


@pytest.mark.parametrize("replaced", [mock.MagicMock(), lambda self: self])
def test_a_method_that_the_program_puts_in_its_place_stays(replaced: Any, made: Any) -> None:
    kind = torch.profiler.record_function
    before = vars(kind)["__enter__"]
    recording = begun(made())
    with mock.patch.object(kind, "__enter__", replaced):
        recording.stop()
        recording = begun(made())
        kind("name").__enter__()
        recording.stop()
        assert vars(kind)["__enter__"] is replaced
    kind.__enter__ = before
