"""Rollout engines that a trainer drives: the trainer's requests, and the server actors that carry them out.

The trainer starts and stops the captures of all selected replicas at the same time.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec

from autoprof.base import log, process, seam
from autoprof.base.originals import time
from autoprof.capture.artifacts import Subject
from autoprof.capture.profilers.torch import TorchTool
from autoprof.capture.recorder import Capture
from autoprof.config import values
from autoprof.config.settings import Settings
from autoprof.config.values import GENERATE
from autoprof.hooks import dispatch
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, CallPath, Reply, Wait, follow
from autoprof.hooks.dispatch import RayCalls, ask
from autoprof.run import cluster, raised, runtime
from autoprof.run.journal import Span
from autoprof.rundir.records import ENGINE, Raised, RaisedLine

ROLE = "rollout"
# Prefix that marks a text of autoprof, in a request to SGLang (`output_dir`) and in SGLang's answer (`message`).
MARK = "autoprof:"


@values.thread_safe
class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Request to an engine: start to record a step, stop, or let the trainer open all windows.

    Attributes:
        action: `start`: record the step. `stop`: stop the recording. `lead`: only the trainer opens the engine's
            windows from now on.
        step: Global step to record.
        loop: Number of the step's loop.
        replica: Number of the engine's replica.
        rank: First global rank that the replica owns.
        overrides: Settings of the window.
        replicas_in_one: True if each data-parallel rank is a separate engine, as in SGLang without attention data
            parallelism.
        reason: Reason why a `stop` ends the recording early. Empty if the recording ends normally.
        run: Run directory of the trainer, in a `lead` request only.
    """

    action: Literal["lead", "start", "stop"]
    step: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(default=0, name="global_step")
    replica: int = 0
    rank: int = 0
    overrides: dict[str, Any] = {}
    replicas_in_one: bool = False
    reason: str = ""
    run: str = ""
    loop: Annotated[int, msgspec.Meta(ge=1)] = 1

    @classmethod
    def read(cls, sent: dict[str, Any] | bytes | str) -> Request:
        """Return the request that `fields`, `body` or `text` has encoded as `sent`.

        Raises:
            ValueError: `sent` is not a request.
        """
        if isinstance(sent, dict):
            return msgspec.convert(sent, cls)
        return msgspec.json.decode(sent.removeprefix(MARK) if isinstance(sent, str) else sent, type=cls)

    def fields(self) -> dict[str, Any]:
        """Return the request as a dict of plain types for Ray or RPC, which processes without autoprof can unpickle."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields

    @classmethod
    def of_step(
        cls, announcement: cluster.StepAnnouncement, replica: int, rank: int, overrides: dict[str, Any]
    ) -> Request:
        """Return the request to record the announced step."""
        return cls(
            action="start",
            step=announcement.step,
            loop=announcement.loop,
            replica=replica,
            rank=rank,
            overrides=overrides,
        )

    def body(self) -> bytes:
        """Return the request as the body of an HTTP request."""
        return msgspec.json.encode(self)

    def text(self) -> str:
        """Return the request as a text that SGLang passes to its schedulers."""
        return MARK + self.body().decode()

    def settings(self, run: runtime.Runtime) -> Settings:
        """Return the run's settings for the role rollout, changed by the settings of the window."""
        return run.settings.overridden(self.overrides).for_role(ROLE)

    def subject(self, part: str, rank: int | None = None) -> Subject:
        """Return the subject of a capture of one part of the engine.

        Args:
            part: Part of the engine, such as `frontend` or one worker.
            rank: Global rank of the part. Default: the replica's first rank.
        """
        rank = self.rank if rank is None else rank
        return Subject(
            step=self.step,
            loop=self.loop,
            role=ROLE,
            stage=ROLE,
            stage_kind=values.GENERATE,
            rank=rank,
            replica=self.replica,
            part=part,
        )

    def span(self, run: runtime.Runtime) -> Span:
        """Begin and return the span of the engine's recording."""
        ids = {"replica": self.replica}
        return Span(run.timeline, "window", ROLE, step=self.step, role=ROLE, rank=self.rank, ids=ids)


def problem_of(where: str, work: Callable[..., str], *args: Any) -> str:
    """Call `work(*args)`, which carries out a request. Return the result of `work`: a problem, or an empty string.

    If `work` raises an exception, report the exception and return a description of the exception.

    Args:
        where: Name of the hook in the report of the exception.
        work: Function that returns a problem, or an empty string.
        *args: Arguments of the function.
    """
    problem, error = seam.attempt(work, *args)
    if error is None:
        return str(problem)
    runtime.report(where, error)
    return f"{type(error).__name__}: {error}"


async def awaited_problem(where: str, work: Awaitable[str]) -> str:
    """Await `work` and return its problem, as `problem_of` does. An exception is not reported if `where` is empty."""
    try:
        return await work
    except Exception as error:
        seam.pass_on(error)
        if where:
            runtime.report(where, error)
        return f"{type(error).__name__}: {error}"


class ObjectPatches:
    """Methods that autoprof has replaced in single objects, until `undo` restores them."""

    def __init__(self) -> None:
        self._patched: list[tuple[Any, str]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace the method `name` of `owner` by the result of `make(method)`, if `owner` has the method."""
        # If the object itself has the attribute, another library has patched the method. `undo` could not restore the
        # patch.
        if hasattr(owner, name) and name not in vars(owner):
            method = getattr(owner, name)
            setattr(owner, name, functools.wraps(method)(make(method)))
            self._patched.append((owner, name))

    def undo(self) -> None:
        """Restore the methods."""
        for owner, name in self._patched:
            vars(owner).pop(name, None)
        self._patched.clear()


def watch_processes(
    owner: Any,
    processes: Sequence[tuple[str, Any]],
    engine: str,
    message: Callable[[], str],
    step: Callable[[], int | None] = lambda: None,
) -> None:
    """Record the processes of an engine that have died by themselves.

    If a process dies, the engine calls a method of the owner that stops all of them. Only the first call counts: an
    engine kills processes that do not stop in time.

    Args:
        owner: The object that stops the processes. Its method is `shutdown` or `close` (vLLM 0.9 to 0.33), or `stop`
            (SGLang).
        processes: The name of each process, and its object of multiprocessing.
        engine: The name of the engine.
        message: Function that returns a text about the consequence.
        step: Function that returns the number of the current step.
    """
    calls = itertools.count()

    def record() -> None:
        for _, each in processes:
            each.join(0.001)  # reads the exit status of a process that has just ended
        named = [raised.named_process(each.pid, each.exitcode, name=name) for name, each in processes if each.exitcode]
        run = runtime.current()
        if named and run is not None:
            error = Raised(type=engine, message=message(), named=named)
            run.timeline.write(RaisedLine(time.time_ns(), ENGINE, named[0].name, step(), ROLE, None, error))

    def recording(stop: Any) -> Any:
        def record_and_stop(*args: Any, **kwargs: Any) -> Any:
            with seam.guard("the deaths of an engine's processes can't be recorded", log.error_once):
                if next(calls) == 0:
                    record()
            return stop(*args, **kwargs)

        return record_and_stop

    # `replace` does nothing if the method is already replaced.
    for name in ("shutdown", "close", "stop"):
        ObjectPatches().replace(owner, name, recording)


class EngineActor(Behaviour):
    """A method of the server actor that accepts any keyword. A call with `autoprof=` is a request of the trainer.

    Attributes:
        engine: Path from a parameter of the call to the engine. On a node without an engine, the value is missing or
            not set.
        node_rank: Path from a parameter of the call to the number of the actor's node in the replica. Only node 0 has
            an engine.
    """

    default_engine: ClassVar[str]
    # Functions that start and stop the engine's recording. In their answers, `problem` is empty on success.
    start: ClassVar[Callable[..., Awaitable[dict[str, Any]]]]
    stop: ClassVar[Callable[..., Awaitable[dict[str, Any]]]]

    engine: CallPath = ""
    node_rank: CallPath = "self.node_rank"

    def around(self, call: Call) -> Around:
        content = call.kwargs.get("autoprof")
        if content is None:
            yield CALL
            return None
        problem = yield dispatch.Coroutine(awaited_problem("", self._carry_out(call, content)))
        return Reply({"problem": problem})

    async def _carry_out(self, call: Call, content: dict[str, Any]) -> str:
        """Carry out a request. Return the problem, or an empty string, also on a node without an engine."""
        if call.at(self.node_rank, 0) != 0 or (engine := call.at(self.engine or self.default_engine)) is None:
            return ""
        request = Request.read(content)
        answer = await (self.start(engine, request) if request.action == "start" else self.stop(engine))
        return str(answer["problem"])

    def supply(self, owner: type, name: str, key: str) -> bool:
        """Add the method to a server class that lacks the method (verl 0.5.0 to 0.7.0).

        Ray pickles the method by value. So the method must not refer to other objects. In a process without autoprof,
        the method reports no problem, as on a node without an engine.
        """

        async def method(self: Any, **kwargs: Any) -> dict[str, Any]:
            return {}

        method.__module__ = owner.__module__
        method.__name__, method.__qualname__ = name, f"{owner.__qualname__}.{name}"
        setattr(owner, name, method)
        return True


# Attribute of an engine while its workers record for autoprof. Its value is the capture, whose meta file is written
# when the workers stop.
_OPEN = "_autoprof_open"


class _NoTool(TorchTool):
    """Tool of a capture without a trace: the engine's own profiler records, and autoprof writes only the meta file."""

    name = "none"


class RpcServer(EngineActor, kw_only=True):
    """A method of the server actor of an engine such as TensorRT-LLM, which has an awaitable `collective_rpc(method)`.

    The workers record with their own profiler. autoprof has no trace, and writes a meta file that says where the
    workers' recordings are.

    Attributes:
        kept: Text in the meta file that says where the workers' own recordings are.
        begin: Name of the workers' method that starts a recording.
        end: Name of the workers' method that stops a recording.
    """

    default_engine = "self.llm"

    kept: str
    begin: str = "start_profile"
    end: str = "stop_profile"

    async def start(self, engine: Any, request: Request) -> dict[str, Any]:
        run = runtime.current()
        if run is None:
            return {"problem": "autoprof is off in the server's process"}
        if hasattr(engine, _OPEN):
            return {"problem": "its workers are started already"}
        settings = request.settings(run)
        await asyncio.wait_for(engine.collective_rpc(self.begin), settings.stop_timeout_s)
        capture = Capture(run, request.subject("engine"), settings, _NoTool())
        capture.artifacts.open()
        setattr(engine, _OPEN, capture)
        return {"problem": ""}

    async def stop(self, engine: Any) -> dict[str, Any]:
        run, capture = runtime.current(), getattr(engine, _OPEN, None)
        if run is None or capture is None:
            return {"problem": "its workers were not started"}
        delattr(engine, _OPEN)
        await asyncio.wait_for(engine.collective_rpc(self.end), run.settings.for_role(ROLE).stop_timeout_s)
        capture.fail(f"autoprof has no trace: {self.kept}")
        return {"problem": ""}


# Seconds to wait for late answers of engines when the trainer starts engines.
LATE_ANSWERS_START_S = 0.05
# Seconds to wait for late answers of engines when the run ends.
LATE_ANSWERS_END_S = 1.0


class Replicas(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Paths to a list of rollout replicas in a trainer.

    Attributes:
        path: Path from a parameter of the call that begins the step to a list of replicas. The paths in `servers`,
            `rank` and `size` begin with a parameter of this call, or with `replica`, which is one item of the list.
        servers: Path to the handle, or the list of handles, of the replica's server actors.
        method: Actor method that receives autoprof's requests. The method must accept any keyword.
        rank: Path to the replica's number. If the path is empty, the number is the replica's index in the list.
        size: Path to the number of global ranks that the replica owns.
        own_devices: True if the engines have devices that the trainer does not use. These engines are captured for the
            whole step. If an engine shares the trainer's devices, its capture must end before the trainer's first
            stage.
    """

    path: CallPath
    servers: str = "replica.servers"
    method: str = "start_profile"
    rank: str = "replica.replica_rank"
    size: str = "replica.world_size"
    own_devices: bool = False

    def engines(self, call: Call) -> Iterator[_Engine]:
        """Yield the engines of all replicas in the list. `call` is the call that begins the step."""
        for index, replica in enumerate(call.at(self.path, None) or ()):

            def at(path: str, replica: Any = replica) -> Any:
                name, _, attributes = path.partition(".")
                if name != "replica":
                    return call.at(path)
                return follow(replica, attributes) if attributes else replica

            number = int(at(self.rank)) if self.rank else index
            servers = at(self.servers)
            for server_index, server in enumerate(servers if isinstance(servers, (list, tuple)) else [servers]):
                method = getattr(server, self.method)
                yield _Engine((number, server_index), int(at(self.size)), self.own_devices, method)


Action = Literal["start", "stop"]
# Number of a replica, and index of the server among the servers of the replica.
ServerId = tuple[int, int]


class _Engine(msgspec.Struct, eq=False):
    """One server actor of a replica.

    Attributes:
        server_id: Number of the replica, and index of the server among the servers of the replica.
        size: Number of global ranks that the replica owns.
        own_devices: True if the engine has devices that the trainer does not use.
        method: Method of the actor that receives the requests.
        recording: True from a start that the engine has not refused until the stop.
    """

    server_id: ServerId
    size: int
    own_devices: bool
    method: Any
    recording: bool = False

    @property
    def number(self) -> int:
        return self.server_id[0]

    @property
    def ranks(self) -> range:
        return range(self.number * self.size, (self.number + 1) * self.size)

    def request(self, action: Action, window: _RolloutWindow) -> Request:
        return Request(
            action=action,
            step=window.step,
            loop=window.loop,
            replica=self.number,
            rank=self.ranks.start,
            overrides=window.overrides,
        )

    def send(self, action: Action, window: _RolloutWindow) -> Any:
        return self.method.remote(autoprof=self.request(action, window).fields())

    def note(self, run: runtime.Runtime, window: _RolloutWindow, problem: str) -> Capture:
        """Write a meta file for the engine, so that `autoprof doctor` can give the reason why there is no trace."""
        request = self.request("start", window)
        note = Capture(run, request.subject("engine"), request.settings(run), TorchTool())
        note.fail(problem)
        return note


class _LateAnswer(NamedTuple):
    """Answer that an engine did not give in time.

    Attributes:
        step: Step of the request to the engine.
        reference: Ray's reference to the answer.
        note: Capture whose meta file has the problem of the engine, if any.
    """

    step: int
    reference: Any
    note: Capture | None


class _RolloutWindow:
    def __init__(self, step: int, loop: int, overrides: dict[str, Any], call: Call, groups: list[Replicas]) -> None:
        self.step = step
        self.loop = loop
        self.overrides = overrides
        self.engines = [engine for group in groups for engine in group.engines(call)]

    def settings(self, run: runtime.Runtime) -> Settings:
        return run.settings.overridden(self.overrides).for_role(ROLE)


class _ReplicaState(process.State):
    """Window of the current step, and requests to engines that are not answered yet.

    Attributes:
        window: Window of the current step, or None if the step is not captured.
        late: Dict from a server to the answer that the server did not give in time. Until the answer comes, the server
            gets no new request.
    """

    def reset(self) -> None:
        self.window: _RolloutWindow | None = None
        self.late: dict[ServerId, _LateAnswer] = {}


_state = _ReplicaState()


def first_ranks(call: Call, groups: list[Replicas]) -> dict[int, int]:
    """Return a dict from the number of each replica to the first global rank of the replica."""
    return {engine.number: engine.ranks.start for group in groups for engine in group.engines(call)}


def open_window(step: int, loop: int, overrides: dict[str, Any], call: Call, groups: list[Replicas]) -> None:
    """Register the engines and the settings of a captured step of a loop."""
    _state.window = _RolloutWindow(step, loop, overrides, call, groups)


def start(run: runtime.Runtime) -> Generator[Wait, Any, list[_Engine]]:
    """Start the recording of each engine that owns a rank of the window and does not record yet.

    Return the engines that got the request. An engine gets no request while an earlier request is unanswered.
    """
    if _state.window is None:
        return []
    settings = _state.window.settings(run)
    selected_engines = [
        engine
        for engine in _state.window.engines
        if not engine.recording and settings.takes(ROLE, engine.ranks, GENERATE)
    ]
    yield from collect_late_answers(LATE_ANSWERS_START_S)
    asked_engines = []
    for engine in selected_engines:
        late_answer = _state.late.get(engine.server_id)
        if late_answer is None:
            asked_engines.append(engine)
        elif late_answer.step != _state.window.step:
            engine.note(run, _state.window, f"the engine has not answered since step {late_answer.step}")
    yield from _ask_engines(run, _state.window, "start", asked_engines)
    return asked_engines


def collect_late_answers(patience_s: float = LATE_ANSWERS_END_S) -> Generator[Wait, Any, None]:
    """Collect late answers of engines. Delete a meta file if an answer shows no problem."""
    servers = list(_state.late)
    if not servers:
        return
    answers = yield RayCalls([_state.late[server].reference for server in servers], patience_s)
    for server, answer in zip(servers, answers, strict=True):
        if isinstance(answer, TimeoutError):
            continue
        late_answer = _state.late.pop(server)
        problem = _problem(answer)
        log.warning(f"step {late_answer.step}, rollout replica {server[0]}: the engine answered late. {problem}")
        # Without a problem, the engine's own processes write the meta files of the capture.
        if late_answer.note is not None and not problem:
            late_answer.note.artifacts.withdraw()


def stop(run: runtime.Runtime, shared_only: bool = False) -> Generator[Wait, Any, None]:
    """Stop the engines that record, and close the window.

    Args:
        run: Run of this process.
        shared_only: True to stop only engines that share the trainer's devices. The window then stays open.
    """
    if _state.window is None:
        return
    engines = [
        engine for engine in _state.window.engines if engine.recording and not (shared_only and engine.own_devices)
    ]
    yield from _ask_engines(run, _state.window, "stop", engines)
    if not shared_only:
        _state.window = None


def send_stop() -> None:
    """Send a stop to the engines that record, and close the window. Don't wait for the answers of the engines."""
    window = _state.window
    if window is None:
        return
    for engine in window.engines:
        if engine.recording:
            engine.recording = False
            engine.send("stop", window)
    _state.window = None


def _ask_engines(
    run: runtime.Runtime, window: _RolloutWindow, action: Action, engines: list[_Engine]
) -> Generator[Wait, Any, None]:
    if not engines:
        return
    # Set `recording` before the answer comes: an engine that answers too late may have started nevertheless.
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
        # The step continues without this engine. The engine may still start later, so send the stop now.
        if action == "start":
            reference = engine.send("stop", window)
        else:
            note = engine.note(
                run, window, f"the engine did not stop within {timeout_s:g} s; training continues without waiting"
            )
        _state.late[engine.server_id] = _LateAnswer(window.step, reference, note)


def _problem(answer: Any) -> str:
    """Return the problem in an engine's answer, or an empty string."""
    if isinstance(answer, Exception):
        return f"{type(answer).__name__}: {str(answer).splitlines()[-1] if str(answer) else ''}"
    # Without autoprof in its process, a method that `EngineActor.supply` has added answers {}, and the target's own
    # method answers None.
    no_autoprof = {"problem": "its process runs without autoprof"}
    return str((answer if isinstance(answer, dict) else no_autoprof).get("problem", ""))


class AroundGeneration(Behaviour):
    """The call generates samples. Engines that do not record yet are captured during the call.

    Outside the trainer's process, the span of the call belongs to the step that is open when the call begins. If no
    step is open then, the span belongs to the step that is open when the call ends.
    """

    def around(self, call: Call) -> Around:
        run = call.run
        trainer_here, announcement = cluster.own_announcement()
        if not trainer_here:
            announcement = yield from ask(cluster.announced_step, run.info.id)
        if announcement is not None and announcement.off:
            yield CALL
            return
        window = _state.window
        asked_engines = yield from start(run)
        span = Span(run.timeline, "stage", ROLE, step=announcement.step if announcement else None, role=ROLE, rank=None)
        outcome = yield CALL
        if not trainer_here and announcement is None:
            announcement = yield from ask(cluster.announced_step, run.info.id)
        span.end(outcome.error, step=announcement.step if announcement else None)
        if run.settings.mode == "continuous" and window is _state.window:
            yield from stop(run, shared_only=True)
        if window is not None:
            yield from _ask_engines(run, window, "stop", [engine for engine in asked_engines if engine.recording])


class EndOfSampling(Behaviour):
    """The call comes after sampling. Before the call, autoprof stops the engines that share the trainer's devices."""

    def around(self, call: Call) -> Around:
        yield from stop(call.run, shared_only=True)
        yield CALL
