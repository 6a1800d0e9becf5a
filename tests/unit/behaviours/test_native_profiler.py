"""autoprof does not record while a target's own profiler is open."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from autoprof.behaviours import stages
from autoprof.capture import recorder
from autoprof.capture.artifacts import Subject
from autoprof.hooks.behaviour import CALL, Around, Call, Outcome
from autoprof.rundir import file_names
from tests.support.captures import begun

SUBJECT = Subject(step=2, role="actor", stage="update_actor", rank=0)
START = stages.NativeStart(whose="the target's own profiler", active=["self.this_step", "self.impl.this_step"])


def drive(around: Around) -> None:
    assert next(around) is CALL
    with pytest.raises(StopIteration):
        around.send(Outcome(None, None))


@pytest.mark.parametrize(
    "profiler", [SimpleNamespace(this_step=True), SimpleNamespace(impl=SimpleNamespace(this_step=True))]
)
def test_no_stage_is_captured_while_the_targets_own_profiler_is_on(joined: Any, profiler: Any) -> None:
    run = joined()
    drive(START.around(Call("k", lambda self: None, (profiler,), {})))
    assert recorder.begin(run, SUBJECT) is None
    drive(stages.NativeStop().around(Call("k", lambda self: None, (profiler,), {})))
    recording = begun(run, SUBJECT)
    recording.stop()
    (first,) = run.rundir.path.rglob(f"actor.update_actor.rank0.*{file_names.META}")
    meta = json.loads(first.read_text())
    assert meta["state"] == "failed"
    assert meta["reason"] == "the target's own profiler is on in this step, so autoprof records nothing"


def test_a_profiler_that_is_off_for_this_rank_is_ignored(joined: Any) -> None:
    run = joined()
    drive(START.around(Call("k", lambda self: None, (SimpleNamespace(this_step=False, impl=None),), {})))
    recording = begun(run, SUBJECT)
    recording.stop()


def test_a_running_capture_ends(joined: Any) -> None:
    run = joined()
    recording = begun(run, SUBJECT)
    drive(START.around(Call("k", lambda self: None, (SimpleNamespace(this_step=True),), {})))
    assert recorder.current() is None
    recording.stop()
    drive(stages.NativeStop().around(Call("k", lambda self: None, (None,), {})))
