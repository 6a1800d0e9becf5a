"""Rollout engines, driven from the trainer: all replicas at once, in time with generation."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from autoprof.base import log, process
from autoprof.behaviours.rollout.engine import ROLE, Request
from autoprof.capture.artifacts import Artifacts
from autoprof.capture.profilers.torch import TorchTool
from autoprof.config.kinds import GENERATE
from autoprof.config.settings import Settings
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, CallPath, Wait, follow
from autoprof.hooks.dispatch import RayCalls, ask
from autoprof.run import runtime, step_announcement
from autoprof.run.timeline import Span

# How long it may take to hear of engines that are late: when a window opens, and when the run ends.
_AT_ONCE_S = 0.05
_AT_THE_END_S = 1.0


class Replicas(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Place where a trainer keeps rollout replicas.

    Attributes:
        path: Path from a parameter of the call that begins the step to a list of replicas. In the paths below,
            `replica` is one of them.
        servers: The handle or the handles of its server actors.
        method: The actor method that autoprof's requests travel by: it must take any keyword.
        rank: Its number among the replicas; empty for its place in the list.
        size: How many global ranks it owns.
        own_devices: Whether the engines have devices that the trainer does not use. They are captured for the whole
            step; the others must be through before the trainer's first stage.
    """

    path: CallPath
    servers: str = "replica.servers"
    method: str = "start_profile"
    rank: str = "replica.replica_rank"
    size: str = "replica.world_size"
    own_devices: bool = False

    def engines(self, call: Call) -> Iterator[_Engine]:
        """Yield the engines that the trainer whose step the call begins has here."""
        for place, replica in enumerate(call.at(self.path, None) or ()):

            def at(path: str, replica: Any = replica) -> Any:
                name, _, rest = path.partition(".")
                if name != "replica":
                    return call.at(path)
                return follow(replica, rest) if rest else replica

            number = int(at(self.rank)) if self.rank else place
            servers = at(self.servers)
            for which, server in enumerate(servers if isinstance(servers, (list, tuple)) else [servers]):
                yield _Engine((number, which), int(at(self.size)), self.own_devices, getattr(server, self.method))


Action = Literal["start", "stop"]
# The number of a replica, and which of its servers.
Place = tuple[int, int]


class _Engine:
    """One server actor of a replica."""

    def __init__(self, place: Place, size: int, own_devices: bool, send: Any) -> None:
        self.place = place
        self.number = place[0]
        self.size = size
        self.own_devices = own_devices
        self.recording = False
        self._send = send

    @property
    def ranks(self) -> range:
        return range(self.number * self.size, (self.number + 1) * self.size)

    def request(self, action: Action, window: _Window) -> Request:
        rank = self.ranks.start
        return Request(action=action, step=window.step, replica=self.number, rank=rank, overrides=window.overrides)

    def send(self, action: Action, window: _Window) -> Any:
        return self._send.remote(autoprof=self.request(action, window).fields())

    def note(self, run: runtime.Runtime, window: _Window, problem: str) -> Artifacts:
        """Leave a meta file in the engine's place, so that `autoprof doctor` can say why there is no trace."""
        request = self.request("start", window)
        note = Artifacts(run, request.subject("engine"), request.settings(run), TorchTool())
        note.fail(problem)
        return note


class _Late(NamedTuple):
    """An answer that did not come in time."""

    step: int
    reference: Any
    # What was left in the engine's place, if anything was.
    note: Artifacts | None


class _Window:
    def __init__(self, step: int, overrides: dict[str, Any], call: Call, places: list[Replicas]) -> None:
        self.step = step
        self.overrides = overrides
        self.engines = [engine for place in places for engine in place.engines(call)]

    def settings(self, run: runtime.Runtime) -> Settings:
        return run.settings.overridden(self.overrides).for_role(ROLE)


class _State(process.State):
    """The window of the step that is going on.

    Attributes:
        late: Engines that have not answered, which nothing is asked of until they do.
    """

    def begin(self) -> None:
        self.window: _Window | None = None
        self.late: dict[Place, _Late] = {}


_state = _State()


def first_ranks(call: Call, places: list[Replicas]) -> dict[int, int]:
    """Return the first global rank that each replica owns, by its number."""
    return {engine.number: engine.ranks.start for place in places for engine in place.engines(call)}


def open_window(step: int, overrides: dict[str, Any], call: Call, places: list[Replicas]) -> None:
    """Note the engines of a step that is captured, and the settings of its own that it is captured with."""
    _state.window = _Window(step, overrides, call, places)


def close_window() -> None:
    """Forget them."""
    _state.window = None


def start(run: runtime.Runtime) -> Generator[Wait, Any, list[_Engine]]:
    """Start the engines that own a rank of the window and don't record yet; those are returned."""
    if _state.window is None:
        return []
    settings = _state.window.settings(run)
    wanted = [
        engine
        for engine in _state.window.engines
        if not engine.recording and settings.takes(ROLE, engine.ranks, GENERATE)
    ]
    yield from _hear_late(_AT_ONCE_S)
    chosen = []
    for engine in wanted:
        late = _state.late.get(engine.place)
        if late is None:
            chosen.append(engine)
        elif late.step != _state.window.step:
            engine.note(run, _state.window, f"the engine has not answered since step {late.step}")
    yield from _ask(run, _state.window, "start", chosen)
    return chosen


def settle() -> Generator[Wait, Any, None]:
    """Hear late answers of engines at the end of the run, and correct the meta files that were left for them."""
    yield from _hear_late(_AT_THE_END_S)


def _hear_late(patience_s: float) -> Generator[Wait, Any, None]:
    places = list(_state.late)
    if not places:
        return
    answers = yield RayCalls([_state.late[place].reference for place in places], patience_s)
    for place, answer in zip(places, answers, strict=True):
        if isinstance(answer, TimeoutError):
            continue
        late = _state.late.pop(place)
        problem = _problem(answer)
        log.warning(f"step {late.step}, rollout replica {place[0]}: the engine answered late. {problem}")
        # What the engine's own processes left says how it went.
        if late.note is not None and not problem:
            late.note.withdraw()


def stop(run: runtime.Runtime, shared_only: bool = False) -> Generator[Wait, Any, None]:
    """Stop the engines that record, or those of them that share the trainer's devices."""
    if _state.window is None:
        return
    chosen = [
        engine for engine in _state.window.engines if engine.recording and not (shared_only and engine.own_devices)
    ]
    yield from _ask(run, _state.window, "stop", chosen)


def drop() -> None:
    """Have the engines that record stop, and forget them. Nobody waits for their answers."""
    window = _state.window
    if window is None:
        return
    for engine in window.engines:
        if engine.recording:
            engine.recording = False
            engine.send("stop", window)
    _state.window = None


def _ask(run: runtime.Runtime, window: _Window, action: Action, engines: list[_Engine]) -> Generator[Wait, Any, None]:
    if not engines:
        return
    # Set before the answer: an engine that answers too late has started all the same.
    for engine in engines:
        engine.recording = action == "start"
    timeout_s = window.settings(run).stop_timeout_s
    references = [engine.send(action, window) for engine in engines]
    answers = yield RayCalls(references, timeout_s)
    for engine, reference, answer in zip(engines, references, answers, strict=True):
        problem = _problem(answer)
        if not problem:
            continue
        note = None
        if action == "start":
            note = engine.note(run, window, f"the engine's start failed: {problem}")
        else:
            log.warning(f"step {window.step}, rollout replica {engine.number}: stop failed: {problem}")
        engine.recording = False
        if not isinstance(answer, TimeoutError):
            continue
        # The step goes on without it. It may still start, and then nobody else would stop it.
        if action == "start":
            reference = engine.send("stop", window)
        else:
            note = engine.note(
                run, window, f"the engine did not stop within {timeout_s:g} s; training goes on without waiting"
            )
        _state.late[engine.place] = _Late(window.step, reference, note)


def _problem(answer: Any) -> str:
    """Return the problem in an engine's answer, or an empty text."""
    if isinstance(answer, Exception):
        return f"{type(answer).__name__}: {str(answer).splitlines()[-1] if str(answer) else ''}"
    # An empty answer is that of a node without an engine; the target's own method answers None.
    without = {"problem": "its process runs without autoprof"}
    return str((answer if isinstance(answer, dict) else without).get("problem", ""))


class AroundGeneration(Behaviour):
    """The call generates: engines are captured around it, but for those that record already.

    In another process than the trainer's, its span is of the step that is going on as it begins, or else as it ends.
    """

    def around(self, call: Call) -> Around:
        run = runtime.current()
        here, posting = step_announcement.own()
        if run is not None and not here:  # in a process beside the trainer
            posting = yield from ask(step_announcement.read, run.info.id)
        if run is None or (posting is not None and posting.off):
            yield CALL
            return None
        window = _state.window
        started = yield from start(run)
        span = Span(run.timeline, "stage", ROLE, step=posting.step if posting else None, role=ROLE, rank=None)
        outcome = yield CALL
        if not here and posting is None:
            posting = yield from ask(step_announcement.read, run.info.id)
        span.end(outcome.error, step=posting.step if posting else None)
        if run.settings.mode == "continuous" and window is _state.window:
            yield from stop(run, shared_only=True)
        if window is not None:
            yield from _ask(run, window, "stop", [engine for engine in started if engine.recording])
        return None


class EndOfSampling(Behaviour):
    """Sampling is through when the call begins: engines that share the trainer's devices are stopped before it."""

    def around(self, call: Call) -> Around:
        run = runtime.current()
        if run is not None:
            yield from stop(run, shared_only=True)
        yield CALL
        return None
