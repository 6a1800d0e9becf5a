"""History of CUDA's caching allocator.

autoprof writes a snapshot of the history for each window, and one when CUDA runs out of memory.

`torch.cuda.memory._record_memory_history` gained parameters in almost every release (torch 2.1 to 2.13). autoprof
passes only the parameters that the installed release accepts. If the program calls this function itself, autoprof
leaves the history to the program.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import wrapt

from autoprof import _boot
from autoprof.base import files, identity, log, process, seam
from autoprof.base.originals import io, os, threading, time
from autoprof.capture import profilers
from autoprof.capture.profilers import Tool, accepted
from autoprof.config.settings import Settings
from autoprof.config.values import MemoryOptions
from autoprof.run import runtime
from autoprof.run.runtime import Runtime
from autoprof.rundir import file_names, layout


class _MemoryState(process.State):
    """The owner of the memory history of this process, and the number of out-of-memory snapshots.

    Attributes:
        theirs: True while the history belongs to the program.
        ours: True while the history belongs to autoprof. If the program switches the history on or off, it belongs to
            autoprof no longer.
        standing: Options of the history that autoprof records outside of windows, for the case that memory runs out.
            None if autoprof records no history outside of windows.
        seen: Number of times that this process has run out of memory, up to `MAX_SNAPSHOTS`.
    """

    def reset(self) -> None:
        self.lock = threading.Lock()
        self.seen = 0
        self.theirs = self.ours = False
        self.standing: MemoryOptions | None = None


_state = _MemoryState()


def begin_history(options: MemoryOptions) -> None:
    """Start a new history, without the entries of autoprof's earlier history.

    Raises:
        Exception: The installed torch or the allocator in use can't record a history.
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
    """End autoprof's history and drop its entries. Then start the history outside of windows again, if there was one.

    A history of the program is not changed.

    Raises:
        Exception: torch can't switch the history.
    """
    if _state.ours:
        _state.ours = False
        _switch()(enabled=None)
        if _state.standing is not None:
            begin_history(_state.standing)


def keep_history(options: MemoryOptions) -> None:
    """From now on, record the history also outside of windows, unless the program records a history.

    Raises:
        Exception: The installed torch or the allocator in use can't record a history.
    """
    if not foreign_history():
        begin_history(options)
        _state.standing = options


def snapshot() -> dict[str, Any]:
    """Return torch's snapshot of the allocator. If a history is recorded, the snapshot contains the history.

    Raises:
        Exception: The allocator in use provides no snapshot.
    """
    import torch.cuda.memory

    state: dict[str, Any] = torch.cuda.memory._snapshot()
    return state


def foreign_history() -> str:
    """If the history belongs to the program, return a text with this reason. Otherwise return an empty text."""
    import torch

    # torch's CUDA graphs also call this function of torch (torch 2.13, _inductor/cudagraph_trees.py).
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", bool)
    is_foreign = _state.theirs or (not _state.ours and enabled())
    return "other code records the memory history of this process" if is_foreign else ""


def _arguments(switch: Callable[..., None], options: MemoryOptions) -> dict[str, Any]:
    """Return the arguments for `_record_memory_history`, without arguments that the installed torch does not accept."""
    arguments: dict[str, Any] = {"enabled": "all", "max_entries": options.max_entries}
    if options.stacks == "none":
        arguments |= {"context": None, "stacks": "python"}
    else:
        arguments |= {"context": "all", "stacks": options.stacks}
    return accepted(switch, arguments)


def _switch() -> Callable[..., None]:
    """Return torch's own `_record_memory_history`. If the function is not wrapped yet, first wrap it.

    The wrapper notes the program's calls.
    """
    import torch.cuda.memory as module

    wrapper = module._record_memory_history
    if getattr(wrapper, "_self_wrapper", None) is not _called:
        wrapt.wrap_function_wrapper(module, "_record_memory_history", _called)
        wrapper = module._record_memory_history
    switch: Callable[..., None] = wrapper.__wrapped__
    return switch


def _called(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    _state.theirs = (args[0] if args else kwargs.get("enabled", "all")) not in (None, False)
    # From now on, only the program switches the history.
    _state.ours, _state.standing = False, None
    return result


class MemoryTool(Tool):
    """Tool that records the memory history with `torch.cuda.memory` and writes a snapshot for torch's memory viewer."""

    name = "memory"
    ending = file_names.SNAPSHOT

    def __init__(self) -> None:
        self._subject: dict[str, Any] = {}
        self._snapshot: dict[str, Any] = {}
        self._problem = ""

    @staticmethod
    def unavailable() -> str:
        """If this process can't record the allocator's history, return the reason. Otherwise return an empty text.

        Only a process that already uses CUDA records. In other processes, `_cuda_record_memory_history` would
        initialise CUDA and take a GPU. A process that only drives other processes must not take a GPU.
        """
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        try:
            return "" if cuda is not None and cuda.is_initialized() else "this process uses no CUDA"
        except (AttributeError, RuntimeError) as error:  # the import of torch has not ended, or has failed
            seam.pass_on(error)
            return f"torch.cuda: {type(error).__name__}: {error}"

    def start(self, settings: Settings, raw: Path) -> list[str]:
        if reason := self.busy():
            raise RuntimeError(reason)
        begin_history(settings.memory)
        return ["memory"]

    def stamp(self, subject: dict[str, Any]) -> None:
        self._subject = {name: value for name, value in subject.items() if isinstance(value, (str, int))}

    def stop(self) -> None:
        """Take the snapshot, then switch the history off, which drops its entries.

        This method raises no errors, because a profiler that records at the same time must also be stopped. `export`
        raises the first error.
        """
        if not _state.ours:
            self._problem = "other code in this process switched the memory history during the capture"
        else:
            self._attempt(self._take)
        self._attempt(end_history)

    def abort(self) -> None:
        self._attempt(end_history)

    def _take(self) -> None:
        self._snapshot = snapshot()

    def _attempt(self, work: Callable[[], None]) -> None:
        """Call a function of torch, which may raise any exception. Keep the first exception for `export`."""
        if (error := seam.attempt(work)[1]) is not None:
            self._problem = self._problem or f"{type(error).__name__}: {error}"

    def export(self, path: str) -> None:
        snapshot, self._snapshot = self._snapshot, {}
        if self._problem:
            raise OSError(self._problem)
        write(snapshot, self._subject, path)

    def busy(self) -> str:
        return foreign_history()


def write(snapshot: dict[str, Any], subject: dict[str, Any], path: str) -> None:
    """Write a snapshot in the format of `torch.cuda.memory._dump_snapshot`. Add the subject under the key `autoprof`.

    Viewers ignore the unknown key.

    Raises:
        OSError: The file can't be written.
    """
    with io.open(path, "wb", opener=files.descriptor) as file:
        pickle.dump(snapshot | {"autoprof": subject}, file)


# Maximum number of out-of-memory snapshots per process. After a failed allocation, a program may try smaller sizes many
# times.
MAX_SNAPSHOTS = 3


def watch_out_of_memory(run: Runtime, doing: Callable[[], Any]) -> None:
    """Write a snapshot when CUDA runs out of memory in this process.

    autoprof begins to record the history when the program initialises CUDA.

    Args:
        run: The run whose folder gets the snapshots.
        doing: Function that returns the subject of this process's current recording; None if there is no recording.
    """
    _boot.when_imported("torch.cuda", lambda cuda: _await_cuda(cuda, run, doing))


def _await_cuda(cuda: Any, run: Runtime, doing: Callable[[], Any]) -> None:
    try:
        # `_lazy_call` calls the function when CUDA is initialised. If CUDA already is, `_lazy_call` calls the function
        # at once (torch 2.13, cuda/__init__.py).
        cuda._lazy_call(lambda: _attach(run, doing))
    except (AttributeError, RuntimeError) as error:  # another release of torch
        seam.pass_on(error)
        runtime.report("memory/oom", error)


def _attach(run: Runtime, doing: Callable[[], Any]) -> None:
    """Attach autoprof's observer for out-of-memory errors, and begin the history.

    Never raises, because after an exception torch would refuse to use CUDA.
    """
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
    """Claim the file name of a snapshot by creating its `.part` file.

    If another snapshot has the name with `number`, try the next numbers.

    Returns:
        The path without an ending, the path of the snapshot, and the path of the `.part` file.
    """
    while True:
        number_suffix = f".{number}" if number > 1 else ""
        base = run.rundir.oom / f"{identity.HOST}.pid{os.getpid()}{number_suffix}"
        path = base.with_name(f"{base.name}{file_names.SNAPSHOT}")
        part = path.with_name(f"{path.name}{file_names.PART}")
        if not files.exists(path) and files.claim(part):
            return base, path, part
        number += 1


def _ran_out(run: Runtime, memory: dict[str, int], doing: Callable[[], Any]) -> None:
    """Write a snapshot and its meta file. Before torch raises `OutOfMemoryError`, it calls this.

    torch does not hold the allocator's lock during this call.

    Args:
        run: The run whose folder gets the snapshot.
        memory: The failed allocation, as fields of the meta file: the device, and sizes in bytes.
        doing: Function that returns the subject of this process's current recording; None if there is no recording.
    """
    with _state.lock:
        if _state.seen >= MAX_SNAPSHOTS:
            return
        _state.seen += 1
        number = _state.seen
    run.rundir.make(run.rundir.oom)
    base, path, part = _claim_path(run, number)
    try:
        subject = {"host": identity.HOST, "pid": os.getpid(), "run": run.info.id}
        seam.no_size_signal(write, snapshot(), subject, str(part))
        os.replace(part, path)
    finally:
        files.remove(str(part))
    meta = {"tool": "memory", "host": identity.HOST, "pid": os.getpid(), "unix_ns": time.time_ns(), **memory}
    meta |= msgspec.to_builtins(doing()) or {}
    meta |= {"versions": profilers.versions(), "bytes": os.stat(path).st_size, "state": "complete", "reason": ""}
    layout.write_json(base.with_name(f"{base.name}{file_names.META}"), meta)
    log.warning(f"CUDA ran out of memory when asked for {memory['asked_bytes']} bytes; a snapshot is in {path}")
