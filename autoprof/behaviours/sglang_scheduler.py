"""SGLang's scheduler: where autoprof's requests arrive, and where forward passes begin.

Every scheduler of a replica, on every node, receives the same requests between the same two passes, so all of them
record the same passes.
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import msgspec

from autoprof import interrupts, runtime, tools
from autoprof.behaviours import Behaviour
from autoprof.behaviours.engine import ROLE
from autoprof.behaviours.sglang_recorder import DECODE, EXTEND, Session
from autoprof.naming import Subject
from autoprof.window import Ranks
from autoprof.wrapping import CALL, Around, Call, Reply

# What `output_dir` begins with in a request of autoprof's, and `message` in the answer.
MARK = "autoprof:"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the server's process sends to the schedulers. The settings of the window travel with it.

    Attributes:
        reason: Of a stop: why the recording ends early, if it does.
        rank: The first global rank that the replica owns.
        replicas_in_one: Whether data parallelism means engines of their own, as without attention data parallelism.
        contents: `AUTOPROF_CONTENTS`.
        iterations: `AUTOPROF_ROLLOUT_ITERATIONS`.
        ranks: `AUTOPROF_RANKS`.
        roles: `AUTOPROF_ROLES`.
        tool: `AUTOPROF_TOOL`.
    """

    action: Literal["start", "stop"]
    reason: str = ""
    step: int = 0
    replica: int = 0
    rank: int = 0
    replicas_in_one: bool = False
    contents: tuple[str, ...] = ()
    iterations: str = "all"
    ranks: str = "all"
    roles: tuple[str, ...] = ("*",)
    tool: tuple[str, ...] = ()


_session: Session | None = None


class Scheduler(Behaviour):
    """The method that receives profiling requests, of SGLang's scheduler or of what profiles for it."""

    def around(self, call: Call) -> Around:
        text = str(getattr(call.argument("recv_req"), "output_dir", ""))
        if not text.startswith(MARK):
            yield CALL
            return None
        try:
            problem = _obey(call.instance, msgspec.json.decode(text.removeprefix(MARK), type=Order))
        except Exception as error:
            interrupts.pass_on(error)
            runtime.report("sglang/scheduler", error)
            problem = f"{type(error).__name__}: {error}"
        return Reply(_answer(MARK + problem))


class Pass(Behaviour):
    """The scheduler's method that runs one forward pass."""

    def around(self, call: Call) -> Around:
        session = _session
        if session is None:
            yield CALL
            return None
        stage = _stage(call.argument("batch"))
        with session.passing(call.instance, stage) or contextlib.nullcontext():
            yield CALL
        return None


def _obey(holder: Any, order: Order) -> str:
    """Do what is asked; returns what went wrong, or an empty text."""
    global _session
    session, _session = _session, None
    if order.action == "stop":
        return session.close(order.reason) if session is not None else ""
    if session is not None:
        session.close("whoever started it went away")
    run = runtime.start()
    if run is None:
        return "autoprof is off in the scheduler's process"
    rank, part = _place(holder, order)
    settings = msgspec.structs.replace(
        run.settings.for_role(ROLE),
        contents=order.contents,
        rollout_iterations=order.iterations,
        roles=order.roles,
        tool=order.tool,
    )
    if rank not in Ranks.parse(order.ranks) or not settings.takes_role(ROLE):
        return ""
    if why := tools.choose(settings).busy():
        return why
    subject = Subject(step=order.step, role=ROLE, stage="rollout", rank=rank, replica=order.replica, part=part)
    _session = Session(run, settings, subject)
    return ""


def _place(holder: Any, order: Order) -> tuple[int, str]:
    """The scheduler's global rank, and its ranks as SGLang itself names its traces."""
    # On the scheduler up to 0.5.12, then in `ps` of what profiles for it, in 0.5.23 told by a function.
    known = holder if hasattr(holder, "tp_rank") else getattr(holder, "ps", None) or _parallel()

    def number(*names: str, default: int) -> int:
        return next((int(getattr(known, name)) for name in names if getattr(known, name, None) is not None), default)

    tensor, pipeline, data = (number(f"{kind}_rank", default=0) for kind in ("tp", "pp", "dp"))
    tensors, pipelines = number("tp_size", default=1), number("pp_size", default=1)
    part = [f"TP-{tensor}"]
    if number("dp_size", "num_dp_ranks", default=1) > 1:
        part.append(f"DP-{data}")
    if pipelines > 1:
        part.append(f"PP-{pipeline}")
    if number("moe_ep_size", default=1) > 1:
        part.append(f"EP-{number('moe_ep_rank', default=0)}")
    rank = order.rank + tensor + pipeline * tensors + (data * tensors * pipelines if order.replicas_in_one else 0)
    return rank, "-".join(part)


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def _stage(batch: Any) -> str:
    """Which of the two stages a pass belongs to, or an empty text: idle ranks run passes of nothing."""
    mode = batch.forward_mode
    if mode.is_decode():
        return DECODE
    return EXTEND if mode.is_extend() else ""


def _answer(message: str) -> Any:
    from sglang.srt.managers.io_struct import ProfileReqOutput

    return ProfileReqOutput(success=True, message=message)
