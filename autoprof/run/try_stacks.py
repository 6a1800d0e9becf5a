"""Samples of the main thread's stack, for `autoprof recipes --try`.

The command finds the functions in which a step spends the time that no stage covers. The samples have times, so the
command can compare them with the spans of the timeline.
"""

from __future__ import annotations

from pathlib import Path
from types import FrameType

from autoprof.base import files, identity, process, seam
from autoprof.base.originals import io, json, os, threading, time
from autoprof.run.stacks import current_frames

ENDING = ".stacks.txt"
INTERVAL_S = 0.01
# Maximum number of samples per process: about half an hour.
_MAX_SAMPLES = 200_000
# Frames of these packages are no work of the program.
_LEFT_OUT = ("autoprof", "importlib", "_frozen_importlib", "runpy", "threading")


class _Sampler(process.State):
    """The thread that takes the samples. `on` is True if the thread was started in this process."""

    def reset(self) -> None:
        self.on = False

    def after_fork_in_child(self) -> None:
        self.reset()

    def start(self, folder: Path) -> None:
        """Start the thread, once per process. The samples go to a file in `folder`."""
        if not self.on:
            self.on = True
            path = folder / f"{identity.HOST}-{os.getpid()}.{os.urandom(4).hex()}{ENDING}"
            process.start_thread(threading.Thread(target=_sample, args=(path,), daemon=True).start)


def _sample(path: Path) -> None:
    main_thread = threading.main_thread().ident
    with seam.suppress(OSError), io.open(files.create(path, held=True), "w", encoding="utf-8") as file:
        for _ in range(_MAX_SAMPLES):
            time.sleep(INTERVAL_S)
            if (frame := current_frames().get(main_thread or 0)) is not None:
                file.write(f"{json.dumps([time.time_ns(), _names(frame)])}\n")
                file.flush()


def _names(frame: FrameType | None) -> list[str]:
    """Return the functions of a stack, innermost first, as `module:function`."""
    names = []
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        if module.partition(".")[0] not in _LEFT_OUT and not function.startswith("<"):
            names.append(f"{module}:{function}")
        frame = frame.f_back
    return names


sampler = _Sampler()
