"""Script that calls a real SGLang engine as a server actor does, and prints the answers as JSON.

engine.py MODEL RANKS: one engine runs all scenarios, so that each one also tests that the engine works after the
earlier ones. Each rank has a scheduler in its own process; some errors would end these processes and this one.
"""

import asyncio
import contextlib
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import sglang

from autoprof.behaviours import sglang as sglang_engine
from autoprof.behaviours.rollout import Request
from autoprof.run import runtime

TOKENS = 8
IDLE_S = 2
SAID = {}


@contextlib.contextmanager
def small_disk(folder):
    """Mount a file system of 16 kB at `folder`, and yield True if that was permitted."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)]
    mounted = shutil.which("mount") and not subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode
    try:
        yield bool(mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def full_disk(whole):
    """Limit files to 8 kB for all processes that have a capture in the folder `whole`."""
    pids = [json.loads(path.read_text())["pid"] for path in whole.glob("*.meta.json")]
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (8_000, before[pid][1]))
    try:
        yield
        # Only the first rank answers, so wait until the second has written its trace.
        time.sleep(2)
    finally:
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before[pid])


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
        log_level="warning",
    )
    try:
        drive(engine)
    finally:
        print("RESULT " + json.dumps(SAID), flush=True)
        engine.shutdown()


def drive(engine):
    manager = engine.tokenizer_manager

    def call(coroutine):
        return engine.loop.run_until_complete(asyncio.wait_for(coroutine, 60))

    def generate(tokens=TOKENS):
        parameters = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return engine.generate(input_ids=[5, 6, 7], sampling_params=parameters)["output_ids"]

    def start(step, **settings):
        request = Request(action="start", step=step, replica=1, rank=4, overrides=settings)
        return call(sglang_engine.start(manager, request))

    def stop():
        return call(sglang_engine.stop(manager))

    def users(method, **keywords):
        """Call a method as the user; return "ok" or the exception."""
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

    # Passes are counted from the start of the capture, across requests.
    SAID["two requests"] = [start(6, rollout_iterations="3:6")]
    SAID["tokens two requests"] = [generate(2), generate(6)]
    SAID["two requests"].append(stop())

    record("stacks and shapes", 7, rollout_iterations="0:3", contents=("cpu", "stack", "shapes"))
    record("stages", 8, rollout_iterations="0:3", contents=("cpu", "profile-by-stage"))
    record("stages without an end", 9, rollout_iterations="all", contents=("cpu", "profile-by-stage"))
    unknown = ("cuda", "npu", "memory", "flops", "module", "merge-profiles")
    record("unknown contents", 10, rollout_iterations="0:3", contents=unknown)

    # Windows whose first pass never comes, or comes after the stop.
    record("never reached", 11, rollout_iterations="50:60")
    SAID["no work"] = [start(12, rollout_iterations="0:3"), stop()]
    SAID["no work, stages"] = [start(13, rollout_iterations="0:3", contents=("profile-by-stage",)), stop()]
    SAID["tokens disarmed"] = generate(TOKENS) and generate(60)[:TOKENS]

    SAID["twice"] = [start(14, rollout_iterations="all"), start(14, rollout_iterations="all")]
    generate()
    SAID["twice"] += [stop(), stop()]

    # A file in place of the step's folder, because root can write to any folder.
    steps = runtime.current().rundir.step
    steps(15).write_text("")
    SAID["unwritable"] = [start(15, rollout_iterations="all"), stop()]
    SAID["tokens unwritable"] = generate()
    steps(15).unlink()

    with full_disk(steps(1)):
        record("full disk", 16, rollout_iterations="all")
    with small_disk(steps(17)) as mounted:
        record("small disk", 17, rollout_iterations="all")
        # Only the first rank answers, so wait until the second has written its trace.
        time.sleep(2)
        SAID["small disk"].append(mounted)

    record("second rank", 18, rollout_iterations="0:3", ranks="5")
    SAID["idle"] = [start(19, rollout_iterations="all", contents=("cpu", "stack"))]
    SAID["tokens idle"] = generate()
    time.sleep(IDLE_S)
    SAID["tokens after a pause"] = generate()
    SAID["idle"].append(stop())

    # More requests than the engine runs at a time, so that prefill passes come between decode passes.
    SAID["several"] = [start(20, rollout_iterations="0:6", contents=("cpu", "profile-by-stage"))]
    lengths = [{"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True} for tokens in (2, 3, 9, 9, 9, 9)]
    engine.generate(input_ids=[[5, 6, 7]] * len(lengths), sampling_params=lengths)
    SAID["several"].append(stop())

    # The user's own profiling takes precedence.
    theirs = {"activities": ["CPU"], "with_stack": False}
    SAID["their start"] = [start(21, rollout_iterations="all")]
    generate()
    SAID["their start"].append(users("start_profile", output_dir=str(Path("theirs", "a").absolute()), **theirs))
    SAID["their start"].append(stop())
    SAID["start in theirs"] = [start(22), stop()]
    generate()
    SAID["their start"].append(users("stop_profile"))
    SAID["their stop"] = [start(23, rollout_iterations="all"), users("stop_profile")]
    generate()
    SAID["their stop"].append(stop())
    started = start(24)
    users("start_profile", output_dir=str(Path("theirs", "b").absolute()), **theirs)
    generate()
    SAID["theirs before the first pass"] = [started, users("stop_profile"), stop()]
    # The user requests a profile from a pass that never comes.
    armed = {"output_dir": str(Path("theirs", "c").absolute()), "start_step": 10_000, "num_steps": 1}
    SAID["their armed"] = [users("start_profile", **armed, **theirs)]
    record("in their armed", 25, rollout_iterations="0:3")

    SAID["tokens after"] = generate()


if __name__ == "__main__":
    began = time.monotonic()
    main(*sys.argv[1:])
    print(f"took {time.monotonic() - began:.0f} s")
