"""Server actors of engines that a trainer drives, and the requests that the trainer sends to the actors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from autoprof.base import seam
from autoprof.capture.artifacts import Subject
from autoprof.capture.profilers.torch import TorchTool
from autoprof.capture.recorder import Capture
from autoprof.config import kinds, structs
from autoprof.config.settings import Settings
from autoprof.hooks import dispatch
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, CallPath, Reply
from autoprof.run import runtime
from autoprof.run.runtime import Runtime
from autoprof.run.timeline import Span

ROLE = "rollout"
# Prefix that marks a text of autoprof, in a request to SGLang (`output_dir`) and in SGLang's answer (`message`).
MARK = "autoprof:"


@structs.complete
class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Request to an engine: start to record a step, stop, or let the trainer open all windows.

    Attributes:
        action: `start`: record the step. `stop`: stop the recording. `lead`: only the trainer opens the engine's
            windows from now on.
        step: Global step to record.
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

    def body(self) -> bytes:
        """Return the request as the body of an HTTP request."""
        return msgspec.json.encode(self)

    def text(self) -> str:
        """Return the request as a text that SGLang passes to its schedulers."""
        return MARK + self.body().decode()

    def settings(self, run: Runtime) -> Settings:
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
            role=ROLE,
            stage=ROLE,
            stage_kind=kinds.GENERATE,
            rank=rank,
            replica=self.replica,
            part=part,
        )

    def span(self, run: Runtime) -> Span:
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
    try:
        return work(*args)
    except Exception as error:
        seam.pass_on(error)
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


class EngineActor(Behaviour):
    """A method of the server actor that accepts any keyword. A call with `autoprof=` is a request of the trainer.

    Attributes:
        engine: Path from a parameter of the call to the engine. On a node without an engine, the value is missing or
            not set.
        node_rank: Path from a parameter of the call to the number of the actor's node in the replica. Only node 0 has
            an engine.
    """

    default_engine: ClassVar[str]

    engine: CallPath = ""
    node_rank: CallPath = "self.node_rank"

    def around(self, call: Call) -> Around:
        content = call.kwargs.get("autoprof")
        if content is None:
            yield CALL
            return None
        if call.at(self.node_rank, 0) != 0:
            return Reply({})
        try:
            engine = call.at(self.engine or self.default_engine)
            if engine is None:
                return Reply({})
            request = Request.read(content)
            work = self.start(engine, request) if request.action == "start" else self.stop(engine)
            answer = yield dispatch.Coroutine(work)
        except Exception as error:
            seam.pass_on(error)
            return Reply({"problem": f"{type(error).__name__}: {error}"})
        return Reply(answer)

    def supply(self, owner: type, name: str, key: str) -> bool:
        """Add the method to a server class that lacks the method (verl 0.5.0 to 0.7.0).

        Ray pickles the method by value. So the method must not refer to other objects. In a process without autoprof,
        the method gives the same answer as a node without an engine.
        """

        async def method(self: Any, **kwargs: Any) -> dict[str, Any]:
            return {}

        method.__module__ = owner.__module__
        method.__name__, method.__qualname__ = name, f"{owner.__qualname__}.{name}"
        setattr(owner, name, method)
        return True

    def start(self, engine: Any, request: Request) -> Coroutine[Any, Any, dict[str, Any]]:
        """Start the engine's recording. In the returned answer, `problem` is empty if the start succeeded."""
        raise NotImplementedError

    def stop(self, engine: Any) -> Coroutine[Any, Any, dict[str, Any]]:
        """Stop the engine's recording. In the returned answer, `problem` is empty if the stop succeeded."""
        raise NotImplementedError


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
        capture.open()
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
