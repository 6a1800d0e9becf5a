"""Rollout engines, driven from the trainer: all replicas at once, in time with generation."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import msgspec

from autoprof import board, log, runtime
from autoprof.behaviours import Behaviour
from autoprof.behaviours.stage import takes
from autoprof.naming import Subject
from autoprof.paths import CallPath, follow
from autoprof.placement import Placement
from autoprof.settings import Settings
from autoprof.timeline import Span
from autoprof.tools.torch import TorchTool
from autoprof.waits import RayCalls
from autoprof.wrapping import CALL, Around, Call, Wait

ROLE = "rollout"
# How long it may take to hear of engines that are late: when a window opens, and when the run ends.
_AT_ONCE_S = 0.05
_AT_THE_END_S = 1.0


class Replicas(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a trainer keeps rollout replicas.

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
        """The engines that the trainer whose step the call begins has here."""
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

    def request(self, action: str, window: _Window) -> Any:
        return self._send.remote(
            autoprof={
                "action": action,
                "step": window.step,
                "replica": self.number,
                "rank": self.ranks.start,
                "overrides": window.overrides,
            }
        )

    def note(self, run: runtime.Runtime, window: _Window, problem: str) -> Placement:
        """Leave a meta file in the engine's place, so that `autoprof doctor` can say why there is no trace."""
        rank = self.ranks.start
        subject = Subject(step=window.step, role=ROLE, stage=ROLE, rank=rank, replica=self.number, part="engine")
        place = Placement(run, subject, window.settings(run), TorchTool.name)
        place.fail(problem)
        return place


class _Late(NamedTuple):
    """An answer that did not come in time."""

    step: int
    reference: Any
    # What was left in the engine's place, if anything was.
    note: Placement | None


# Engines that have not answered, which nothing is asked of until they do.
_late: dict[Place, _Late] = {}


class _Window:
    def __init__(self, step: int, overrides: dict[str, Any], call: Call, places: list[Replicas]) -> None:
        self.step = step
        self.overrides = overrides
        self.engines = [engine for place in places for engine in place.engines(call)]

    def settings(self, run: runtime.Runtime) -> Settings:
        return run.settings.overridden(self.overrides).for_role(ROLE)


_window: _Window | None = None


def first_ranks(call: Call, places: list[Replicas]) -> dict[int, int]:
    """The first global rank that each replica owns, by its number."""
    return {engine.number: engine.ranks.start for place in places for engine in place.engines(call)}


def open_window(step: int, overrides: dict[str, Any], call: Call, places: list[Replicas]) -> None:
    """Note the engines of a step that is captured, and the settings of its own that it is captured with."""
    global _window
    _window = _Window(step, overrides, call, places)


def close_window() -> None:
    """Forget them."""
    global _window
    _window = None


def start(run: runtime.Runtime) -> Generator[Wait, Any, list[_Engine]]:
    """Start the engines that own a rank of the window and don't record yet; those are returned."""
    if _window is None:
        return []
    settings = _window.settings(run)
    wanted = [engine for engine in _window.engines if not engine.recording and takes(settings, ROLE, engine.ranks)]
    yield from _hear_late(_AT_ONCE_S)
    chosen = []
    for engine in wanted:
        late = _late.get(engine.place)
        if late is None:
            chosen.append(engine)
        elif late.step != _window.step:
            engine.note(run, _window, f"the engine has not answered yet since step {late.step}")
    yield from _ask(run, _window, "start", chosen)
    return chosen


def settle() -> Generator[Wait, Any, None]:
    """The run ends: hear what has become of engines that did not answer in time, so that what was left says so."""
    yield from _hear_late(_AT_THE_END_S)


def _hear_late(patience_s: float) -> Generator[Wait, Any, None]:
    places = list(_late)
    if not places:
        return
    answers = yield RayCalls([_late[place].reference for place in places], patience_s)
    for place, answer in zip(places, answers, strict=True):
        if isinstance(answer, TimeoutError):
            continue
        late = _late.pop(place)
        problem = _problem(answer)
        log.warning(f"step {late.step}, rollout replica {place[0]}: the engine has answered after all. {problem}")
        # What the engine's own processes left says how it went.
        if late.note is not None and not problem:
            late.note.withdraw()


def stop(run: runtime.Runtime, shared_only: bool = False) -> Generator[Wait, Any, None]:
    """Stop the engines that record, or those of them that share the trainer's devices."""
    if _window is None:
        return
    chosen = [engine for engine in _window.engines if engine.recording and not (shared_only and engine.own_devices)]
    yield from _ask(run, _window, "stop", chosen)


def _ask(run: runtime.Runtime, window: _Window, action: str, engines: list[_Engine]) -> Generator[Wait, Any, None]:
    if not engines:
        return
    # Set before the answer: an engine that answers too late has started all the same.
    for engine in engines:
        engine.recording = action == "start"
    timeout_s = window.settings(run).stop_timeout_s
    references = [engine.request(action, window) for engine in engines]
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
            reference = engine.request("stop", window)
        else:
            note = engine.note(run, window, f"the engine's stop did not end within {timeout_s:g} s; it goes on")
        _late[engine.place] = _Late(window.step, reference, note)


def _problem(answer: Any) -> str:
    """What an engine's answer says went wrong, or an empty text."""
    if isinstance(answer, Exception):
        return f"{type(answer).__name__}: {str(answer).splitlines()[-1] if str(answer) else ''}"
    # An empty answer is that of a node without an engine; the target's own method answers None.
    without = {"problem": "its process runs without autoprof"}
    return str((answer if isinstance(answer, dict) else without).get("problem", ""))


class AroundGeneration(Behaviour):
    """The call generates: engines are captured around it, but for those that record already."""

    def around(self, call: Call) -> Around:
        run = runtime.current()
        _, posting = board.own()
        if run is None or (posting is not None and posting.off):
            yield CALL
            return None
        window = _window
        started = yield from start(run)
        span = Span(run, "stage", ROLE, step=posting.step if posting else None, role=ROLE, rank=None)
        outcome = yield CALL
        span.end(outcome.error)
        if run.settings.mode == "continuous" and window is _window:
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
