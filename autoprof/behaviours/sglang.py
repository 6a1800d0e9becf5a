"""SGLang: its own profiler is driven through the `TokenizerManager`, as vLLM's through its engine.

What is sent is chosen in `sglang_arguments.py`, made to fit in the scheduler (`sglang_scheduler.py`), and what comes of
it is placed by `sglang_session.py`.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

import msgspec

from autoprof import log, runtime
from autoprof.behaviours import Behaviour
from autoprof.behaviours.sglang_session import OPEN, Session, own_call
from autoprof.behaviours.vllm import Request
from autoprof.paths import follow
from autoprof.waits import Coroutine
from autoprof.wrapping import CALL, Around, Call, Reply, wrapped_by


class Server(Behaviour):
    """A method of the server actor that takes any keyword: a call with `autoprof=` is a request of the trainer's.

    Attributes:
        engine: Attribute path on the actor to the `TokenizerManager`, None on nodes that have none.
        node_rank: Attribute path to the actor's number in a replica over several nodes; only 0 has an engine.
    """

    engine: str = "tokenizer_manager"
    node_rank: str = "node_rank"

    def around(self, call: Call) -> Around:
        asked = call.kwargs.get("autoprof")
        if asked is None:
            yield CALL
            return None
        engine = follow(call.instance, self.engine, None)
        if engine is None or follow(call.instance, self.node_rank, 0) != 0:
            return Reply({})
        try:
            request = msgspec.convert(asked, Request)
            answer = yield Coroutine(start(engine, request) if request.action == "start" else stop(engine))
        except Exception as error:
            return Reply({"problem": f"{type(error).__name__}: {error}"})
        return Reply(answer)


class Engine(Behaviour):
    """`TokenizerManager.start_profile` and `stop_profile`, as somebody else calls them, over HTTP too: autoprof's
    recording ends before the call, which then does what it would do without autoprof.

    That nobody else is recording is seen to in the scheduler, which alone knows it.

    Attributes:
        action: Which of the two the hook is on.
    """

    action: Literal["start", "stop"]

    def around(self, call: Call) -> Around:
        if not own_call.get() and hasattr(call.instance, OPEN):
            verb = "started" if self.action == "start" else "stopped"
            log.warning(f"somebody else {verb} the engine's profiler; autoprof's recording ends early")
            yield Coroutine(stop(call.instance, f"somebody else {verb} the engine's profiler"))
        yield CALL
        return None


async def start(engine: Any, request: Request) -> dict[str, Any]:
    """Have the engine of a `TokenizerManager` record. Answers with a problem, or an empty text."""
    run = runtime.current()
    if run is None:
        return {"problem": "autoprof is off in the server's process"}
    if hasattr(engine, OPEN):
        return {"problem": "it is recording already"}
    if why := _unfit():
        return {"problem": why}
    session = Session(engine, run, request)
    setattr(engine, OPEN, session)
    return await session.within(session.begin())


async def stop(engine: Any, cut: str = "") -> dict[str, Any]:
    """Stop the engine of a `TokenizerManager` and place what it recorded.

    Args:
        engine: The `TokenizerManager`.
        cut: Why the recording ends early, if it does.
    """
    session = getattr(engine, OPEN, None)
    if session is None:
        return {"problem": "it was not recording"}
    if session.ending:
        return {"problem": "it is being stopped already"}
    session.ending = True
    answer: dict[str, Any] = await session.within(session.end(cut))
    return answer


def _unfit() -> str:
    """Why no engine of this process can be driven, or an empty text."""
    if os.environ.get("SGLANG_PROFILE_V2", "").lower() in ("1", "true"):
        return "SGLANG_PROFILE_V2 is set, whose profiler autoprof does not know"
    for module, path in (
        ("sglang.srt.managers.scheduler", "Scheduler.profile"),
        ("sglang.srt.managers.scheduler_components.profiler_manager", "SchedulerProfilerManager._profile"),
    ):
        if wrapped_by(follow(sys.modules.get(module), path, None)):
            return ""
    return "autoprof's hook in SGLang's scheduler was not applied"
