"""Fakes of SGLang's scheduler, and requests to them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoprof.behaviours import sglang as sglang_scheduler
from autoprof.behaviours.rollout import MARK, Request
from autoprof.behaviours.sglang import Scheduler as Requests
from autoprof.behaviours.sglang import SchedulerPass
from autoprof.capture import recorder
from autoprof.hooks.behaviour import CALL, Call, Outcome, Reply
from autoprof.run import end
from autoprof.run.runtime import Runtime
from autoprof.rundir import file_names
from tests.support import packages

torch = packages.package("torch")

NOTHING = "the engine ran 0 forward passes"


@dataclass
class Mode:
    """Fake of SGLang's ForwardMode."""

    name: str

    def is_decode(self) -> bool:
        return self.name == "DECODE"

    def is_extend(self) -> bool:
        return self.name in ("EXTEND", "MIXED")


class Scheduler:
    """Fake of the scheduler of SGLang up to 0.5.12; each pass adds an event `work` to a trace."""

    def __init__(self, **ranks: int) -> None:
        self.tp_rank = 1
        self.tp_size = 2
        vars(self).update(ranks)

    def run_batch(self, batch: Any) -> None:
        with torch.profiler.record_function("work"):
            torch.ones(3).sum()

    def get_next_batch_to_run(self) -> None:
        """Do nothing; event loops poll this method."""


@pytest.fixture
def run(joined: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setattr(sglang_scheduler, "_answer", lambda message: message)
    recorder.watch_others()
    return joined()


def start(holder: Any, step: int = 3, **settings: Any) -> str:
    """Send the start of a window with these settings through the hook, and return the problem or an empty text."""
    overrides = {"contents": ["cpu"], "ranks": "all"} | settings
    overrides = {name: value for name, value in overrides.items() if value}  # empty: use the run's own setting
    return send(holder, Request(action="start", step=step, replica=2, rank=4, overrides=overrides))


def stop(holder: Any, reason: str = "") -> str:
    """Send a stop through the hook, and return the problem or an empty text."""
    return send(holder, Request(action="stop", reason=reason))


def send(holder: Any, request: Request) -> str:
    reply = receive(holder, SimpleNamespace(output_dir=request.text()))
    assert isinstance(reply, Reply)
    assert reply.value.startswith(MARK)
    return str(reply.value.removeprefix(MARK))


def receive(holder: Any, request: Any) -> Any:
    """Send a request through the hook. Return autoprof's reply, or None if SGLang's own method was called."""

    def profile(self: Any, recv_req: Any) -> None:
        raise NotImplementedError

    around = Requests().around(Call("sglang/scheduler", profile, (holder, request), {}))
    try:
        assert next(around) is CALL
    except StopIteration as stop:
        return stop.value
    with pytest.raises(StopIteration):
        around.send(Outcome(None, None))
    return None


def passes(scheduler: Scheduler, *stages: str) -> None:
    for stage in stages:
        call = Call("sglang/pass", Scheduler.run_batch, (scheduler, SimpleNamespace(forward_mode=Mode(stage))), {})
        around = SchedulerPass().around(call)
        assert next(around) is CALL
        scheduler.run_batch(None)
        with pytest.raises(StopIteration):
            around.send(Outcome(None, None))


def found(run: Runtime, step: int = 3) -> dict[str, tuple[dict[str, Any], list[str]]]:
    """Return, by rank part of the engine, the meta file and the names of the trace's events."""
    end.wait_for_files(run)
    captures = {}
    for path in run.rundir.step(step).glob("*.meta.json"):
        trace = Path(str(path).replace(file_names.META, file_names.TRACE))
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if trace.exists() else []
        names = [event.get("name", "") for event in events if event.get("ph") == "X"]
        captures[path.name.split(".")[2]] = (json.loads(path.read_text()), names)
    return captures


DECODES = ["DECODE"] * 7
