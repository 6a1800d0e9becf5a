"""History of CUDA's caching allocator: one snapshot per window, and one when memory runs out.

`torch.cuda.memory._record_memory_history` gained parameters in almost every release (torch 2.1 to 2.13); only those
that the installed release accepts are passed. If the program calls it itself, its calls take precedence.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import wrapt

from autoprof import _boot
from autoprof.base import files, identity, interrupts, log, process
from autoprof.base.originals import io, os, threading, time
from autoprof.capture import profilers
from autoprof.capture.profilers.arguments import taken
from autoprof.config.settings import Settings
from autoprof.config.tool_options import MemoryOptions
from autoprof.run import runtime
from autoprof.run.runtime import Runtime
from autoprof.rundir import file_names, layout


class _HistoryState(process.State):
    """The owner of this process's history.

    Attributes:
        changes: How often somebody else has switched it.
        theirs: Whether it is somebody else's now.
        ours: Whether it is autoprof's now.
        standing: The options with which it goes on outside of windows, where it is kept for when memory runs out.
    """

    def begin(self) -> None:
        self.changes = 0
        self.theirs = self.ours = False
        self.standing: MemoryOptions | None = None


_history_state = _HistoryState()


def begin_history(options: MemoryOptions) -> None:
    """Record from here on; what was recorded before is forgotten.

    Raises:
        Exception: This torch, or the allocator in use, records no history.
    """
    switch = _switch()
    if _history_state.ours:
        switch(enabled=None)
    arguments = _arguments(switch, options)
    if "max_entries" not in arguments:
        raise RuntimeError("this torch can't bound the memory history")
    switch(**arguments)
    _history_state.ours = True


def end_history() -> None:
    """Record no longer, or go on as outside of windows; what was recorded is forgotten. Another's history stays.

    Raises:
        Exception: torch refuses.
    """
    if _history_state.ours:
        _history_state.ours = False
        _switch()(enabled=None)
        if _history_state.standing is not None:
            begin_history(_history_state.standing)


def keep_history(options: MemoryOptions) -> None:
    """Record outside of windows, too, unless somebody else does.

    Raises:
        Exception: As in `begin`.
    """
    if not foreign_history():
        begin_history(options)
        _history_state.standing = options


def snapshot() -> dict[str, Any]:
    """Return the state of the allocator, and the history as far as it is recorded.

    Raises:
        Exception: The allocator in use can't be asked.
    """
    import torch.cuda.memory

    found: dict[str, Any] = torch.cuda.memory._snapshot()
    return found


def history_changes() -> int:
    """Return how often somebody else has switched the history of this process, since autoprof first did."""
    _switch()
    return _history_state.changes


def foreign_history() -> str:
    """Return why the history is left alone: it is somebody else's; or an empty text."""
    import torch

    # As torch's own CUDA graphs ask (torch 2.13, _inductor/cudagraph_trees.py).
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", bool)
    taken = _history_state.theirs or (not _history_state.ours and enabled())
    return "other code records the memory history of this process" if taken else ""


def _arguments(switch: Callable[..., None], options: MemoryOptions) -> dict[str, Any]:
    """Return the arguments for `_record_memory_history` that it takes: a build of torch may lack some."""
    asked: dict[str, Any] = {"enabled": "all", "max_entries": options.max_entries}
    if options.stacks == "none":
        asked |= {"context": None, "stacks": "python"}
    else:
        asked |= {"context": "all", "stacks": options.stacks}
    return taken(switch, asked)


def _switch() -> Callable[..., None]:
    """Return torch's own function, behind the watch that is put on it here."""
    import torch.cuda.memory as module

    watched = module._record_memory_history
    if getattr(watched, "_self_wrapper", None) is not _called:
        wrapt.wrap_function_wrapper(module, "_record_memory_history", _called)
        watched = module._record_memory_history
    switch: Callable[..., None] = watched.__wrapped__
    return switch


def _called(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    _history_state.changes += 1
    _history_state.theirs = (args[0] if args else kwargs.get("enabled", "all")) not in (None, False)
    # From here on it is the user's to switch.
    _history_state.ours, _history_state.standing = False, None
    return result


class MemoryTool:
    """Records with `torch.cuda.memory` and writes a snapshot that torch's memory viewer opens."""

    name = "memory"
    ending = file_names.SNAPSHOT
    lost: Sequence[str] = ()
    remark = ""

    def __init__(self) -> None:
        self._subject: dict[str, Any] = {}
        self._snapshot: dict[str, Any] = {}
        self._problem = ""
        self._changes = 0

    @staticmethod
    def unavailable() -> str:
        """Return why this process can't record the allocator's history, or an empty text.

        Asking for it would make the process take a GPU (`_cuda_record_memory_history` initialises CUDA), which one
        that only drives others must not.
        """
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        try:
            return "" if cuda is not None and cuda.is_initialized() else "this process uses no CUDA"
        except Exception as error:
            interrupts.pass_on(error)
            return f"torch.cuda: {type(error).__name__}: {error}"

    def start(self, settings: Settings, raw: Path) -> list[str]:
        if why := self.busy():
            raise RuntimeError(why)
        self._changes = history_changes()
        begin_history(settings.memory)
        return ["memory"]

    def stamp(self, subject: dict[str, Any]) -> None:
        self._subject = {name: value for name, value in subject.items() if isinstance(value, (str, int))}

    def mark(self, name: str) -> Callable[[], None]:
        return _nothing

    def stop(self) -> None:
        """Take the snapshot and switch the history off, which empties it. Raises nothing: a profiler stops as well."""
        try:
            if history_changes() != self._changes:
                self._problem = "other code in this process switched the memory history during the capture"
            else:
                self._snapshot = snapshot()
        except Exception as error:
            interrupts.pass_on(error)
            self._problem = f"{type(error).__name__}: {error}"
        try:
            end_history()
        except Exception as error:
            interrupts.pass_on(error)
            self._problem = self._problem or f"{type(error).__name__}: {error}"

    def abort(self) -> None:
        with interrupts.suppress(Exception):
            end_history()

    def export(self, path: str) -> None:
        snapshot, self._snapshot = self._snapshot, {}
        if self._problem:
            raise OSError(self._problem)
        write(snapshot, self._subject, path)

    def busy(self) -> str:
        return foreign_history()


def write(snapshot: dict[str, Any], subject: dict[str, Any], path: str) -> None:
    """Write a snapshot as `torch.cuda.memory._dump_snapshot` does, and in it, under `autoprof`, what it is of.

    Viewers look into it by key.

    Raises:
        OSError: It can't be written.
    """
    with io.open(path, "wb", opener=files.descriptor) as file:
        pickle.dump(snapshot | {"autoprof": subject}, file)


def _nothing() -> None:
    """Do nothing: the history has no ranges."""


# Of one process: an allocation that fails may be tried again in a smaller form, any number of times.
MOST = 3


class _OutOfMemoryState(process.State):
    """The count of times that this process has run out of memory, up to `MOST`."""

    def begin(self) -> None:
        self.lock = threading.Lock()
        self.seen = 0

    def in_child(self) -> None:
        self.lock = threading.Lock()


_oom_state = _OutOfMemoryState()


def watch_out_of_memory(run: Runtime, doing: Callable[[], Any]) -> None:
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
        keep_history(run.settings.memory)
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
        with _oom_state.lock:
            if _oom_state.seen >= MOST:
                return
            _oom_state.seen += 1
            number = _oom_state.seen
        run.rundir.make(run.rundir.oom)
        base, path, part = _place(run, number)
        try:
            subject = {"host": identity.HOST, "pid": os.getpid(), "run": run.info.id}
            files.no_size_signal(write, snapshot(), subject, str(part))
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
