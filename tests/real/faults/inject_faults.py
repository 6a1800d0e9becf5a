"""Fault injection in the processes of a real run: `FAULTS=hook-raises@1,start-fails@2,stop-hangs@3`.

The import probe imports this module in every process. Most faults are in autoprof or in functions that it calls.
`killed`, `crashes`, `raises` and `memory` are faults of the target, which happen without autoprof too.
"""

import ctypes
import functools
import os
import signal
import sys
from pathlib import Path

import wrapt

HANGS_S = 1200


def _hook_raises(step):
    """Let two hooks raise in this step: the actor's before the call, the reference's after the call, in a capture."""

    def stage(module):
        wanted = module.Stage.wanted

        def failing(self, stage, announcement):
            if stage.key[0] == "actor" and announcement.step == step:
                raise RuntimeError("injected before the call")
            return wanted(self, stage, announcement)

        module.Stage.wanted = failing

    def running(module):
        stop = module.RunningStage.stop

        def failing(self, error=None, *reason):
            if self.key[0] == "ref" and self.step == step:
                module.running.pop(self.key)
                raise RuntimeError("injected after the call")
            return stop(self, error, *reason)

        module.RunningStage.stop = failing

    wrapt.register_post_import_hook(stage, "autoprof.behaviours.stages")
    wrapt.register_post_import_hook(running, "autoprof.behaviours.stages")


def _start_fails(step):
    """Let torch's profiler fail to start in this step."""

    def tool(module):
        start = module.TorchTool.start

        def failing(self, settings, raw):
            if f"global_step_{step:06d}" in str(raw):
                raise RuntimeError("injected at the start")
            return start(self, settings, raw)

        module.TorchTool.start = failing

    wrapt.register_post_import_hook(tool, "autoprof.capture.profilers.torch")


def _stop_hangs(call):
    """Let this call of the engine's own stop hang for 20 minutes, as vLLM's stop can."""

    def engine(module):
        import asyncio

        stop, calls = module.AsyncLLM.stop_profile, []

        @functools.wraps(stop)
        async def hanging(self):
            calls.append(None)
            if len(calls) == call:
                await asyncio.sleep(HANGS_S)
            return await stop(self)

        module.AsyncLLM.stop_profile = hanging

    wrapt.register_post_import_hook(engine, "vllm.v1.engine.async_llm")


def score_or_fail():
    """Raise the exception of the reward."""
    raise ValueError("no score")


def _raises(call):
    """Let the reward raise in this call; calls are counted per process."""

    def rewards(module):
        load, calls = module.load_extern_object, []

        def loaded(*args, **kwargs):
            found = load(*args, **kwargs)
            if getattr(found, "__name__", "") != "compute_score":
                return found

            @functools.wraps(found)
            def failing(*args, **kwargs):
                calls.append(None)
                if len(calls) == call:
                    score_or_fail()
                return found(*args, **kwargs)

            return failing

        module.load_extern_object = loaded

    wrapt.register_post_import_hook(rewards, "verl.utils.import_utils")


def _crashes(step):
    """Let the trainer read an invalid address while it computes the advantages of this step."""

    def algorithms(module):
        compute, calls = module.compute_grpo_outcome_advantage, []

        @functools.wraps(compute)
        def crashing(*args, **kwargs):
            calls.append(None)
            if len(calls) == step:
                ctypes.string_at(0)
            return compute(*args, **kwargs)

        module.compute_grpo_outcome_advantage = crashing

    wrapt.register_post_import_hook(algorithms, "verl.trainer.ppo.core_algos")


def _memory(call):
    """Put all processes into the control group MEMORY_GROUP, whose memory is limited.

    The worker allocates memory without end in this call of its loss.
    """
    (Path(os.environ["MEMORY_GROUP"]) / "cgroup.procs").write_text(str(os.getpid()))

    def take_all():
        taken = [b"x" * (64 << 20)]
        while True:
            taken.append(taken[0][:-1] + b"x")

    _in_loss(call, take_all)


def _killed(call):
    """Kill the worker in this call of its loss, during its update."""
    _in_loss(call, lambda: os.kill(os.getpid(), signal.SIGKILL))


def _in_loss(call, work):
    def algorithms(module):
        loss, calls = module.get_policy_loss_fn, []

        @functools.wraps(loss)
        def ended(*args, **kwargs):
            calls.append(None)
            if len(calls) == call:
                work()
            return loss(*args, **kwargs)

        module.get_policy_loss_fn = ended

    wrapt.register_post_import_hook(algorithms, "verl.trainer.ppo.core_algos")


def _without_autoprof(_):
    """Remove autoprof from Ray's workers, as on a node without autoprof."""
    if any("default_worker.py" in word for word in sys.orig_argv[:4]):
        sys.meta_path[:] = [finder for finder in sys.meta_path if "autoprof" not in type(finder).__module__]
        for name in [name for name in sys.modules if name.split(".")[0] in ("autoprof", "_autoprof_gate")]:
            del sys.modules[name]
        sys.modules["autoprof"] = sys.modules["_autoprof_gate"] = None


_FAULTS = {
    "none": lambda _: None,
    "hook-raises": _hook_raises,
    "start-fails": _start_fails,
    "stop-hangs": _stop_hangs,
    "crashes": _crashes,
    "raises": _raises,
    "memory": _memory,
    "killed": _killed,
    "without-autoprof": _without_autoprof,
}
for _fault in os.environ["FAULTS"].split(","):
    _name, _, _number = _fault.partition("@")
    _FAULTS[_name](int(_number or 0))
