"""Drives a real SGLang engine as a server actor would, and prints what each call answered as JSON.

engine.py MODEL RANKS: one engine does everything, so that each scenario also shows that the ones before left it well.
Its schedulers are other processes, one for each rank; some mistakes would end them and this one with them.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import msgspec
import sglang

from autoprof import runtime
from autoprof.behaviours import sglang as autoprof_sglang
from autoprof.rundir import RunDir

TOKENS = 8
SAID = {}


class SeveralNodes:
    """SGLang's ServerArgs, but for the number of nodes."""

    nnodes = 2

    def __init__(self, own):
        self._own = own

    def __getattr__(self, name):
        return getattr(self._own, name)


def main(model, ranks):
    engine = sglang.Engine(
        model_path=model,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        dtype="float32",
        mem_fraction_static=0.1,
        max_total_tokens=1024,
        max_running_requests=4,
        tp_size=int(ranks),
        sleep_on_idle=True,
        log_level="warning",
    )
    try:
        drive(engine)
    finally:
        print("RESULT " + json.dumps(SAID), flush=True)
        engine.shutdown()


def drive(engine):
    manager = engine.tokenizer_manager
    plain = runtime.current().settings

    def call(coroutine):
        return engine.loop.run_until_complete(asyncio.wait_for(coroutine, 60))

    def generate(tokens=TOKENS):
        parameters = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return engine.generate(input_ids=[5, 6, 7], sampling_params=parameters)["output_ids"]

    def start(step, **settings):
        runtime.current().settings = msgspec.structs.replace(plain, **settings)
        return call(
            autoprof_sglang.start(manager, autoprof_sglang.Request(action="start", step=step, replica=1, rank=4))
        )

    def stop():
        return call(autoprof_sglang.stop(manager))

    def users(method, **keywords):
        """What a call of the user's own does, in whichever form this version takes it."""
        try:
            getattr(engine, method)(**keywords)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "ok"

    def record(name, step, tokens=TOKENS, **settings):
        answers = [start(step, **settings)]
        SAID["tokens " + name] = generate(tokens)
        SAID[name] = [*answers, stop()]

    SAID["tokens before"] = generate()
    SAID["stop without start"] = stop()
    record("whole", 1, rollout_iterations="all")
    record("first three", 2, rollout_iterations="0:3")
    record("middle", 3, rollout_iterations="2:5")
    record("last one", 4, rollout_iterations="7:8")
    record("over the end", 5, rollout_iterations="5:100")

    # Passes are counted from the start of the capture, whoever asks for them.
    SAID["two requests"] = [start(6, rollout_iterations="3:6")]
    SAID["tokens two requests"] = [generate(2), generate(6)]
    SAID["two requests"].append(stop())

    record("stacks and shapes", 7, rollout_iterations="0:3", contents=("cpu", "stack", "shapes"))
    record("stages", 8, rollout_iterations="0:3", contents=("cpu", "profile-by-stage"))
    record("stages without an end", 9, rollout_iterations="all", contents=("cpu", "profile-by-stage"))
    unknown = ("cuda", "npu", "memory", "flops", "module", "merge-profiles")
    record("unknown contents", 10, rollout_iterations="0:3", contents=unknown)
    record("merged", 21, rollout_iterations="0:3", contents=("cpu", "sglang-merge-profiles"))

    # Armed for a pass that never comes, and for one that comes after the stop.
    record("never reached", 11, rollout_iterations="50:60")
    SAID["no work"] = [start(12, rollout_iterations="0:3"), stop()]
    SAID["no work, stages"] = [start(13, rollout_iterations="0:3", contents=("profile-by-stage",)), stop()]
    SAID["tokens disarmed"] = generate(TOKENS) and generate(60)[:TOKENS]

    SAID["twice"] = [start(14, rollout_iterations="all"), start(14, rollout_iterations="all")]
    generate()
    SAID["twice"] += [stop(), stop()]

    here = runtime.current().rundir
    blocked = Path("blocked")
    blocked.write_text("")
    runtime.current().rundir = RunDir(blocked / "run")
    SAID["unwritable"] = [start(15), stop()]
    runtime.current().rundir = here
    SAID["tokens unwritable"] = generate()

    # A replica that says it is on several nodes is not armed: it begins at once.
    own = manager.server_args
    manager.server_args = SeveralNodes(own)
    started = start(20, rollout_iterations="1:3")
    manager.server_args = own
    SAID["tokens at once"] = generate()
    SAID["at once"] = [started, stop()]

    # Somebody else's profiling goes first.
    theirs = {"activities": ["CPU"], "with_stack": False}
    SAID["their start"] = [start(16, rollout_iterations="all")]
    generate()
    SAID["their start"].append(users("start_profile", output_dir=str(Path("theirs", "a").absolute()), **theirs))
    SAID["start in theirs"] = start(17)
    generate()
    SAID["their start"] += [users("stop_profile"), stop()]
    SAID["their stop"] = [start(18, rollout_iterations="all")]
    generate()
    SAID["their stop"] += [users("stop_profile"), stop()]
    armed = {"output_dir": str(Path("theirs", "b").absolute()), "start_step": 10_000, "num_steps": 1}
    SAID["their armed"] = [users("start_profile", **armed, **theirs), start(19)]

    SAID["tokens after"] = generate()


if __name__ == "__main__":
    began = time.monotonic()
    main(*sys.argv[1:])
    print(f"through in {time.monotonic() - began:.0f} s")
