"""History of CUDA's caching allocator: one snapshot per window, and one when memory runs out.

`torch.cuda.memory._record_memory_history` gained parameters in almost every release (torch 2.1 to 2.13). Only the ones
that the installed release accepts are passed. If the program calls the function itself, its calls take precedence.
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
from autoprof.base import files, identity, log, process, seam
from autoprof.base.originals import io, os, threading, time
from autoprof.capture import profilers
from autoprof.capture.profilers import accepted, nothing
from autoprof.config.settings import Settings
from autoprof.config.values import MemoryOptions
from autoprof.run import runtime
from autoprof.run.runtime import Runtime
from autoprof.rundir import file_names, layout


class _MemoryState(process.State):
    """Owner of this process's history, and the number of snapshots.

    Attributes:
        changes: Number of times that the program has switched it.
        theirs: True while it belongs to the program.
        ours: True while it belongs to autoprof.
        standing: Options of the history outside of windows, if it is recorded for the case that memory runs out.
        seen: Number of times that this process has run out of memory, up to `MAX_SNAPSHOTS`.
    """

    def begin(self) -> None:
        self.lock = threading.Lock()
        self.seen = 0
        self.changes = 0
        self.theirs = self.ours = False
        self.standing: MemoryOptions | None = None


_state = _MemoryState()


def begin_history(options: MemoryOptions) -> None:
    """Start a new history. The entries so far are dropped.

    Raises:
        Exception: This torch, or the allocator in use, records no history.
    """
    switch = _switch()
    if _state.ours:
        switch(enabled=None)
    arguments = _arguments(switch, options)
    if "max_entries" not in arguments:
        raise RuntimeError("this torch can't bound the memory history")
    switch(**arguments)
    _state.ours = True


def end_history() -> None:
    """End autoprof's history and drop its entries, or start the one outside of windows.

    A history of the program is not changed.

    Raises:
        Exception: torch refuses.
    """
    if _state.ours:
        _state.ours = False
        _switch()(enabled=None)
        if _state.standing is not None:
            begin_history(_state.standing)


def keep_history(options: MemoryOptions) -> None:
    """Record outside of windows, too, unless the program records a history.

    Raises:
        Exception: As in `begin_history`.
    """
    if not foreign_history():
        begin_history(options)
        _state.standing = options


def snapshot() -> dict[str, Any]:
    """Return the state of the allocator, with the history if one is recorded.

    Raises:
        Exception: The allocator in use provides no state.
    """
    import torch.cuda.memory

    state: dict[str, Any] = torch.cuda.memory._snapshot()
    return state


def history_changes() -> int:
    """Return the number of times that the program has switched the history, since autoprof first watched it."""
    _switch()
    return _state.changes


def foreign_history() -> str:
    """Return the reason why autoprof can't record the history: it belongs to the program. Else an empty text."""
    import torch

    # torch's CUDA graphs use the same function (torch 2.13, _inductor/cudagraph_trees.py).
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", bool)
    taken = _state.theirs or (not _state.ours and enabled())
    return "other code records the memory history of this process" if taken else ""


def _arguments(switch: Callable[..., None], options: MemoryOptions) -> dict[str, Any]:
    """Return the arguments for `_record_memory_history`, without the ones that this build of torch lacks."""
    requested: dict[str, Any] = {"enabled": "all", "max_entries": options.max_entries}
    if options.stacks == "none":
        requested |= {"context": None, "stacks": "python"}
    else:
        requested |= {"context": "all", "stacks": options.stacks}
    return accepted(switch, requested)


def _switch() -> Callable[..., None]:
    """Wrap `_record_memory_history` to see the program's calls, if that is not done. Return torch's own function."""
    import torch.cuda.memory as module

    watched = module._record_memory_history
    if getattr(watched, "_self_wrapper", None) is not _called:
        wrapt.wrap_function_wrapper(module, "_record_memory_history", _called)
        watched = module._record_memory_history
    switch: Callable[..., None] = watched.__wrapped__
    return switch


def _called(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    _state.changes += 1
    _state.theirs = (args[0] if args else kwargs.get("enabled", "all")) not in (None, False)
    # From now on only the program switches it.
    _state.ours, _state.standing = False, None
    return result


class MemoryTool:
    """Tool that records with `torch.cuda.memory` and writes a snapshot for torch's memory viewer."""

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
        """Return the reason why this process can't record the allocator's history, or an empty text.

        The process must already use CUDA. `_cuda_record_memory_history` would initialise CUDA and take a GPU, which a
        process that only drives others must not do.
        """
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        try:
            return "" if cuda is not None and cuda.is_initialized() else "this process uses no CUDA"
        except (AttributeError, RuntimeError) as error:  # its import has not ended, or has failed
            seam.pass_on(error)
            return f"torch.cuda: {type(error).__name__}: {error}"

    def start(self, settings: Settings, raw: Path) -> list[str]:
        if reason := self.busy():
            raise RuntimeError(reason)
        self._changes = history_changes()
        begin_history(settings.memory)
        return ["memory"]

    def stamp(self, subject: dict[str, Any]) -> None:
        self._subject = {name: value for name, value in subject.items() if isinstance(value, (str, int))}

    def mark(self, name: str) -> Callable[[], None]:
        return nothing

    def stop(self) -> None:
        """Take the snapshot and switch the history off, which empties it.

        Errors are kept for `export`, since a profiler that records beside it must stop, too.
        """
        if history_changes() != self._changes:
            self._problem = "other code in this process switched the memory history during the capture"
        else:
            self._attempt(self._take)
        self._attempt(end_history)

    def abort(self) -> None:
        self._attempt(end_history)

    def _take(self) -> None:
        self._snapshot = snapshot()

    def _attempt(self, work: Callable[[], None]) -> None:
        """Call a function of torch. It may raise anything; the first error is the problem."""
        with seam.guard("torch.cuda.memory", self._note):
            work()

    def _note(self, what: str, error: BaseException) -> None:
        self._problem = self._problem or f"{type(error).__name__}: {error}"

    def export(self, path: str) -> None:
        snapshot, self._snapshot = self._snapshot, {}
        if self._problem:
            raise OSError(self._problem)
        write(snapshot, self._subject, path)

    def busy(self) -> str:
        return foreign_history()


def write(snapshot: dict[str, Any], subject: dict[str, Any], path: str) -> None:
    """Write a snapshot as `torch.cuda.memory._dump_snapshot` does, with the subject under the key `autoprof`.

    Viewers ignore unknown keys.

    Raises:
        OSError: The file can't be written.
    """
    with io.open(path, "wb", opener=files.descriptor) as file:
        pickle.dump(snapshot | {"autoprof": subject}, file)


# Maximum number of snapshots per process. A program may repeat a failed allocation with a smaller size, many times.
MAX_SNAPSHOTS = 3


def watch_out_of_memory(run: Runtime, doing: Callable[[], Any]) -> None:
    """Record the history once CUDA is initialised in this process, and write a snapshot when CUDA runs out of memory.

    Args:
        run: The run.
        doing: Function that returns the subject of this process's recording, or None.
    """
    _boot.when_imported("torch.cuda", lambda cuda: _await_cuda(cuda, run, doing))


def _await_cuda(cuda: Any, run: Runtime, doing: Callable[[], Any]) -> None:
    try:
        # `_lazy_call` calls the function once CUDA is initialised, or at once if it is (torch 2.13, cuda/__init__.py).
        cuda._lazy_call(lambda: _attach(run, doing))
    except (AttributeError, RuntimeError) as error:  # another release of torch
        seam.pass_on(error)
        runtime.report("memory/oom", error)


def _attach(run: Runtime, doing: Callable[[], Any]) -> None:
    """Attach the observer. Never raises, since torch would then refuse to use CUDA."""
    with seam.guard("memory/oom", runtime.report):
        import torch

        def ran_out(device: int, asked: int, total: int, free: int) -> None:
            memory = {"device": device, "asked_bytes": asked, "total_bytes": total, "free_bytes": free}
            # An exception here would replace the `OutOfMemoryError` (torch 2.13, csrc/cuda/Module.cpp).
            with seam.guard("memory/oom", runtime.report):
                _ran_out(run, memory, doing)

        torch._C._cuda_attach_out_of_memory_observer(ran_out)
        keep_history(run.settings.memory)


def _claim_path(run: Runtime, number: int) -> tuple[Path, Path, Path]:
    """Claim the first free name for a snapshot, beginning with `number`, by its `.part` file.

    Returns:
        The path without ending, the path of the snapshot, and the path of the `.part` file.
    """
    while True:
        again = f".{number}" if number > 1 else ""
        base = run.rundir.oom / f"{identity.HOST}.pid{os.getpid()}{again}"
        path = base.with_name(f"{base.name}{file_names.SNAPSHOT}")
        part = path.with_name(f"{path.name}{file_names.PART}")
        if not files.exists(path) and files.claim(part):
            return base, path, part
        number += 1


def _ran_out(run: Runtime, memory: dict[str, int], doing: Callable[[], Any]) -> None:
    """Write a snapshot. torch calls this without the allocator's lock, before it raises `OutOfMemoryError`."""
    with _state.lock:
        if _state.seen >= MAX_SNAPSHOTS:
            return
        _state.seen += 1
        number = _state.seen
    run.rundir.make(run.rundir.oom)
    base, path, part = _claim_path(run, number)
    try:
        subject = {"host": identity.HOST, "pid": os.getpid(), "run": run.info.id}
        files.no_size_signal(write, snapshot(), subject, str(part))
        os.replace(part, path)
    finally:
        files.remove(str(part))
    meta = {"tool": "memory", "host": identity.HOST, "pid": os.getpid(), "unix_ns": time.time_ns(), **memory}
    meta |= msgspec.to_builtins(doing()) or {}
    meta |= {"versions": profilers.versions(), "bytes": os.stat(path).st_size, "state": "complete", "reason": ""}
    layout.write_json(base.with_name(f"{base.name}{file_names.META}"), meta)
    log.warning(f"CUDA ran out of memory when asked for {memory['asked_bytes']} bytes; a snapshot is in {path}")
