"""Places in stacks: which function of a stack tells where a process is, and for what it waits."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import PurePath

from autoprof.base import files, interrupts
from autoprof.rundir.stacks import Frame, Thread

# Packages that do what others ask of them.
_PLUMBING = {
    *("torch", "torch_npu", "ray", "asyncio", "uvloop", "requests", "urllib3", "httpx", "httpcore", "aiohttp", "anyio"),
    *("grpc", "zmq", "tensordict", "hydra", "numpy", "autoprof", "wrapt", "psutil", "pandas", "pyarrow", "datasets"),
    *("tqdm", "fsspec", "redis", "boto3", "botocore", "openai"),
}
_OUTER = ("<module>", "main", "__call__", "run", "wrapper", "inner")
_LIBRARY = re.compile(r"(?:site|dist)-packages[/\\]([^/\\.]+)")
_STANDARD = re.compile(r"[/\\]lib(?:64)?[/\\]python\d[^/\\]*[/\\]|^<")
_OWN = re.compile(r"[/\\]autoprof[/\\]capture[/\\]")
COLLECTIVE, RAY, IDLE = "in a collective", "in ray.get", "idle"
_MOST_SOURCE = 4 << 20


def package(frame: Frame) -> str:
    """Return the package that a function is of: empty for one of the user's, `python` for one of Python's own."""
    return _package(frame.file)


@functools.lru_cache(4096)
def _package(file: str) -> str:
    if found := _LIBRARY.search(file):
        return found[1]
    return "python" if _STANDARD.search(file) else ""


def told(frames: Sequence[Frame]) -> Frame | None:
    """Return the function that tells best where a stack is: the innermost one of the user's, or of a trainer's."""
    if (profiling := _profiling(frames)) is not None:
        return profiling
    own = [frame for frame in frames if not package(frame)]
    if inner := [frame for frame in own if name(frame) not in _OUTER]:
        return inner[-1]
    others = [frame for frame in frames if package(frame) not in ("", "python") and package(frame) not in _PLUMBING]
    return next(iter([*others[-1:], *own[-1:], *frames[-1:]]), None)


def own(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost function of the user's or of a trainer's, where nothing but plumbing lies inside of it."""
    return _profiling(frames) or next(
        (frame for frame in reversed(frames) if package(frame) != "python" and package(frame) not in _PLUMBING), None
    )


def _profiling(frames: Sequence[Frame]) -> Frame | None:
    """Return autoprof's own function, where it starts or ends a profiler: what is inside of it is torch's."""
    return next((frame for frame in reversed(frames) if _OWN.search(frame.file)), None)


def name(frame: Frame) -> str:
    """Return a function's name without those of its class and of the functions around it."""
    return frame.function.rpartition(".")[2]


def text(frame: Frame) -> str:
    """Return a place as it is told: `reward.py:44 fetch_score`."""
    said = f"{PurePath(frame.file).name or '?'}:{frame.line} {name(frame)}".strip()
    return f"autoprof, which starts or ends a profiler, {said}" if _OWN.search(frame.file) else said


def waits(frames: Sequence[Frame]) -> str:
    """Return for what a stack waits, as far as its innermost functions tell: one of the words above, or nothing."""
    inner = frames[-8:]
    if any("torch/distributed/" in frame.file and package(frame) == "torch" for frame in inner):
        return COLLECTIVE
    ray = [frame for frame in inner if package(frame) == "ray"]
    if any(name(frame) in ("get", "wait", "get_objects") for frame in ray):
        return RAY
    last = frames[-1] if frames else None
    if (
        last is None
        or "forever" in name(last)
        or name(last)
        in (
            "main_loop",
            "select",
            "_worker",
            "wait",
            "poll",
            "run_forever",
            "accept",
            "_run_once",
        )
    ):
        return IDLE
    return RAY if ray and ray[-1] is last and name(last) != "main_loop" else ""


def _source(file: str, sources: dict[str, list[str]]) -> list[str]:
    """Return the lines of a program's file, where it lies here too."""
    if file not in sources:
        try:
            content = files.read(file, _MOST_SOURCE) if file.endswith(".py") else b""
        except (OSError, ValueError) as error:
            interrupts.pass_on(error)
            content = b""
        sources[file] = content.decode(errors="replace").splitlines()
    return sources[file]


def waits_for_itself(thread: Thread) -> Frame | None:
    """Return where an actor of Ray's waits for what it was itself asked to do, by the source around that line."""
    frames = thread.frames
    # The thread of an actor's methods, and that of an asynchronous one's loop (Ray 2.60, `_raylet.pyx`).
    of_actor = any("ray/_private/workers" in frame.file for frame in frames[:3])
    if waits(frames) != RAY or not (of_actor or thread.name.startswith("AsyncIO Thread: ")):
        return None
    place = next((frame for frame in reversed(frames) if not package(frame)), None)
    if place is None:
        return None
    lines = _source(place.file, {})
    near = "\n".join(lines[max(0, place.line - 6) : place.line])
    return place if re.search(r"current_actor|self_handle|get_actor\(", near) else None
