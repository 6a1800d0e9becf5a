"""A snapshot of CUDA's caching allocator when it runs out of memory, in any step: in `oom/` of the run directory.

In one place, since most such steps are in no window and have no folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from autoprof import _boot
from autoprof.base import files, identity, interrupts, log, process
from autoprof.base.originals import os, threading, time
from autoprof.capture import profilers
from autoprof.capture.profilers import memory_history
from autoprof.capture.profilers.memory import write
from autoprof.run import runtime
from autoprof.run.runtime import Runtime
from autoprof.rundir import file_names, layout

# Of one process: an allocation that fails may be tried again in a smaller form, any number of times.
MOST = 3


class _State(process.State):
    """The count of times that this process has run out of memory, up to `MOST`."""

    def begin(self) -> None:
        self.lock = threading.Lock()
        self.seen = 0

    def in_child(self) -> None:
        self.lock = threading.Lock()


_state = _State()


def watch(run: Runtime, doing: Callable[[], Any]) -> None:
    """Keep the history and wait for the allocator to run out of memory, from when CUDA is initialised in this process.

    Args:
        run: The run.
        doing: Gives what this process is recording, or None.
    """
    _boot.when_imported("torch.cuda", lambda cuda: _await_cuda(cuda, run, doing))


def _await_cuda(cuda: Any, run: Runtime, doing: Callable[[], Any]) -> None:
    try:
        # What is queued so is called when CUDA is initialised, or at once where it is (torch 2.13, cuda/__init__.py).
        cuda._lazy_call(lambda: _attach(run, doing))
    except Exception as error:
        interrupts.pass_on(error)
        runtime.report("memory/oom", error)


def _attach(run: Runtime, doing: Callable[[], Any]) -> None:
    """Attach the observer. Raises nothing: torch would refuse CUDA then."""
    try:
        import torch

        def ran_out(device: int, asked: int, total: int, free: int) -> None:
            memory = {"device": device, "asked_bytes": asked, "total_bytes": total, "free_bytes": free}
            _ran_out(run, memory, doing)

        torch._C._cuda_attach_out_of_memory_observer(ran_out)
        memory_history.keep(run.settings.memory)
    except Exception as error:
        interrupts.pass_on(error)
        runtime.report("memory/oom", error)


def _place(run: Runtime, number: int) -> tuple[Path, Path, Path]:
    """Return the first names from `number` on that are not taken, of the snapshot and of its part, which is made."""
    while True:
        again = f".{number}" if number > 1 else ""
        base = run.rundir.oom / f"{identity.HOST}.pid{os.getpid()}{again}"
        path = base.with_name(f"{base.name}{file_names.SNAPSHOT}")
        part = path.with_name(f"{path.name}{file_names.PART}")
        if not files.exists(path) and files.claim(part):
            return base, path, part
        number += 1


def _ran_out(run: Runtime, memory: dict[str, int], doing: Callable[[], Any]) -> None:
    """Write a snapshot. torch calls this without the allocator's lock, before it raises.

    An exception from here would take the place of the one that it raises (torch 2.13, csrc/cuda/Module.cpp).
    """
    try:
        with _state.lock:
            if _state.seen >= MOST:
                return
            _state.seen += 1
            number = _state.seen
        run.rundir.make(run.rundir.oom)
        base, path, part = _place(run, number)
        try:
            subject = {"host": identity.HOST, "pid": os.getpid(), "run": run.info.id}
            with files.no_size_signal():
                write(memory_history.snapshot(), subject, str(part))
            os.replace(part, path)
        except BaseException:
            files.remove(str(part))
            raise
        meta = {"tool": "memory", "host": identity.HOST, "pid": os.getpid(), "unix_ns": time.time_ns(), **memory}
        meta |= msgspec.to_builtins(doing()) or {}
        meta |= {"versions": profilers.versions(), "bytes": os.stat(path).st_size, "state": "complete", "reason": ""}
        layout.write_json(base.with_name(f"{base.name}{file_names.META}"), meta)
        log.warning(f"CUDA ran out of memory when asked for {memory['asked_bytes']} bytes; a snapshot is in {path}")
    except Exception as error:
        interrupts.pass_on(error)
        runtime.report("memory/oom", error)
