"""Script that injects faults while it calls a real AsyncLLM, and prints answers and generated tokens as JSON.

faults.py MODEL
"""

import asyncio
import json
import resource
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import MethodType

from engine import generate, make_engine, request

from autoprof.behaviours import vllm as vllm_engine

RUN = Path("autoprof_runs", "latest")
# Suffixes of a capture's files while they are written: the raw trace, Kineto's own file, the trace, the meta file.
PARTS = (".pt.trace.json.part", ".pt.trace.json.part.tmp", ".pt.trace.json.gz.part", ".meta.json.part")


def folder(step):
    return RUN / f"global_step_{step:06d}"


def captures(step):
    """Wait until a step has both captures, and return their names without suffixes."""
    deadline = time.monotonic() + 120
    while len(found := list(folder(step).glob("*.meta.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    return [path.name.removesuffix(".meta.json") for path in found]


@contextmanager
def a_file_in_place_of_the_folder(step):
    folder(step).touch()
    yield


@contextmanager
def a_file_in_place_of_the_run(step):
    run = RUN.resolve()
    away = run.rename(run.with_name("away"))
    run.touch()
    yield
    run.unlink()
    away.rename(run)


def full_disk(size, finished=True):
    """Return a fault: captured processes can't write files of more than `size` bytes, even as root."""

    @contextmanager
    def fault(step):
        pids = [int(name.rpartition(".pid")[2]) for name in captures(1)]
        before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, before[pid][1]))
        try:
            yield
            if finished:
                captures(step)
        finally:
            for pid in pids:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before[pid])

    return fault


@contextmanager
def planted_links(step):
    """Put symlinks in place of the files that the capture is going to write."""
    theirs = Path("theirs")
    theirs.write_text("precious")
    folder(step).mkdir()
    for name in captures(1):
        for ending in PARTS:
            (folder(step) / f"{name}{ending}").symlink_to(theirs.absolute())
    yield
    captures(step)
    assert theirs.read_text() == "precious"


@contextmanager
def nothing_wrong(step):
    yield


@contextmanager
def a_stop_that_hangs(step):
    async def hang(self):
        await asyncio.sleep(1200)

    # With stacks, the worker records how it waits for work: 1.5 million events in a second (vLLM 0.32).
    share, vllm_engine.ENGINE_STOP_SHARE = vllm_engine.ENGINE_STOP_SHARE, 0.002
    made["engine"].stop_profile = MethodType(hang, made["engine"])
    yield
    del made["engine"].stop_profile
    vllm_engine.ENGINE_STOP_SHARE = share


made = {}


FAULTS = {
    "a file in place of the folder": a_file_in_place_of_the_folder,
    "a file in place of the run": a_file_in_place_of_the_run,
    "no room for the trace": full_disk(8_000),
    "links in place of the files": planted_links,
    "no room at all": full_disk(0, finished=False),
    # inject_faults.py injects this fault in the worker.
    "a profiler that does not start": nothing_wrong,
    "a stop that hangs": a_stop_that_hangs,
    "nothing": nothing_wrong,
}


async def main():
    engine = made["engine"] = make_engine(sys.argv[1])
    said = {"before": await generate(engine, "a")}
    said["stop without start"] = await vllm_engine.stop(engine)
    said["after a stop without start"] = await generate(engine, "b")
    said["start 1"] = await vllm_engine.start(engine, request(1))
    said["start again"] = await vllm_engine.start(engine, request(1))
    said["after a second start"] = await generate(engine, "c")
    said["stop 1"] = await vllm_engine.stop(engine)
    said["stop again"] = await vllm_engine.stop(engine)
    said["after a second stop"] = await generate(engine, "d")
    captures(1)  # wait until they are complete, because a fault moves the run away
    for step, (name, fault) in enumerate(FAULTS.items(), 2):
        with fault(step):
            start = await vllm_engine.start(engine, request(step))
            during = await generate(engine, f"during {step}")
            stop = await vllm_engine.stop(engine)
            after = await generate(engine, f"after {step}")
        said[name] = {"step": step, "start": start, "stop": stop, "during": during, "after": after}
    print("RESULT " + json.dumps(said), flush=True)
    engine.shutdown()
    made.clear()


if __name__ == "__main__":
    asyncio.run(main())
