"""SGLang's scheduler: autoprof's requests are made to fit its own count, and taken back when they are over.

Three things are known in the scheduler's process only: how many forward passes it has counted, whether somebody else's
recording is open or armed, and that a stop leaves what is armed (it fires later all the same, seen with 0.5.8).
"""

from __future__ import annotations

import os
from typing import Any

from autoprof.behaviours import Behaviour
from autoprof.rundir import PART, TRACE
from autoprof.wrapping import CALL, Around, Call, Reply

# How a request of autoprof's is known: by the folder that it names. Its name is that of a trace that is not complete.
FOLDER_ENDING = f".sglang{TRACE}{PART}"
# Set on the holder of SGLang's profiler from autoprof's start to the next stop.
_OURS = "_autoprof_ours"


class Scheduler(Behaviour):
    """The method that receives the requests of a `TokenizerManager`, of SGLang's scheduler or of what profiles for it.

    Every rank of a replica receives the same requests at the same pass, so all of them do the same here.
    """

    def around(self, call: Call) -> Around:
        holder = call.instance
        request = call.argument("recv_req")
        if not _is_start(request):
            yield CALL
            if holder.__dict__.pop(_OURS, False):
                _disarm(holder)
            return None
        if not os.path.basename(request.output_dir or "").endswith(FOLDER_ENDING):
            yield CALL
            return None
        # SGLang starts anew in a recording that is open, and what was recorded is lost (0.5.5 to 0.5.23).
        if _busy(holder):
            return Reply(_refusal("somebody else profiles the engine"))
        if getattr(request, "start_step", None):
            request.start_step += _passes(holder)
        setattr(holder, _OURS, True)
        yield CALL
        return None


def _is_start(request: Any) -> bool:
    # `type` up to 0.5.14, `req_type` from 0.5.15 on.
    kind = getattr(request, "req_type", None) or request.type
    return bool(kind.name == "START_PROFILE")


def _passes(holder: Any) -> int:
    """How many forward passes the scheduler has counted: by itself up to 0.5.12, asked by a callable from 0.5.13 on."""
    asked = getattr(holder, "get_forward_ct", None)
    return int(asked() if asked is not None else holder.forward_ct)


def _busy(holder: Any) -> bool:
    """Whether a recording is open or armed."""
    state = vars(holder)
    # 0.4.6 has activities from a start to the stop, and no word for being in progress.
    if state.get("profile_in_progress", state.get("profiler_activities") is not None):
        return True
    if (state.get("profiler_start_forward_ct") or 0) > _passes(holder):
        return True
    return bool(state.get("profile_by_stage")) and 0 in (
        state.get("profiler_prefill_ct"),
        state.get("profiler_decode_ct"),
    )


def _disarm(holder: Any) -> None:
    """Forget what is armed, after SGLang's own stop: the names are the same from 0.4.9 to 0.5.23."""
    nothing = {"profiler_start_forward_ct": None, "profiler_target_forward_ct": None, "profile_by_stage": False}
    for name, value in nothing.items():
        if name in vars(holder):
            setattr(holder, name, value)


def _refusal(why: str) -> Any:
    from sglang.srt.managers.io_struct import ProfileReqOutput

    return ProfileReqOutput(success=False, message=why)
