"""Composition root of the agent, which is the part of autoprof that works inside the processes of a run."""

from __future__ import annotations

import datetime  # noqa: F401  # before msgspec, see below
import functools

from autoprof import _boot
from autoprof.base import files, log, process, seam
from autoprof.base.originals import os, threading

# msgspec 0.22 imports `typing_extensions` and `datetime`, and ignores all exceptions meanwhile, even of a signal
# handler. If `datetime` is missing, msgspec crashes the process later. So both are imported first.
with seam.suppress(ImportError):
    import typing_extensions  # noqa: F401
from autoprof.capture import recorder

# The first call of a hook and the first capture must not import these modules. If another thread imported one during a
# fork, the child would wait for that import forever. Python's import also loses an `OSError` of a signal handler.
from autoprof.capture.profilers import foreign, memory, npu, nsys, torch  # noqa: F401
from autoprof.hooks import dispatch, patching, recipe, registry, returned  # noqa: F401
from autoprof.run import end, runtime, snapshot, torchrun, watcher
from autoprof.run.runtime import Runtime


class _AgentState(process.State):
    """State that shows if this process has joined a run. At exit, the process that started the run ends the run.

    Attributes:
        joined: True if this process has tried to join a run, which it does once.
        lock: Lock that is held while this process joins a run.
    """

    ends = process.RUN

    def reset(self) -> None:
        self.joined = False
        self.lock = threading.RLock()

    def at_exit(self) -> None:
        if (run := runtime.current()) is None:
            return
        if files.exists(run.rundir.run_json) or run.seat is not None:
            end.end_run(run)
        elif _boot.starter() not in (None, os.getpid()):
            # The process that started the run reports why no hook was applied. For the report, it needs the list of
            # hooks of this process.
            with seam.suppress(OSError):
                run.hooks.leave()


_state = _AgentState()


def load(target: str) -> None:
    """Read the recipes of `target`, and apply each hook when its module is imported, or now if it is imported already.

    A wrong recipe is reported once and skipped.
    """
    run = join()
    if run is None:
        return
    hooks = registry.read_recipes(target)
    # A hook with the behaviour `main` reports when the main module is ready for its hooks. With such a hook, no other
    # code has to watch the main module.
    reports_main = any(hook.hook.behaviour == "main" for hook in hooks)
    for hook in hooks:
        run.hooks.add(hook)
        if reason := registry.left_out(run, hook):
            run.hooks.skipped(hook, reason)
            continue
        if recipe.script(hook.hook.module):
            patching.watch_main(hook)
        else:
            _boot.when_imported(hook.hook.module, functools.partial(patching.apply_to_module, hook))
            if patching.runs_as_main(hook.hook.module) and not reports_main:
                patching.watch_main(hook)


def join() -> Runtime | None:
    """Join the run, and return it. Return None if there is no run. The first call sets up this process."""
    if _state.joined:
        return runtime.current()
    run = runtime.start()
    with _state.lock:
        if run is not None and not _state.joined:
            if _boot.COMMAND.launcher:
                torchrun.watch()
            recorder.watch_others()
            if foreign.free_cupti(run.settings.tool, os.environ) and run.started_here:
                log.warning(
                    f"{foreign.INJECTION} named libcupti, which keeps torch.profiler from recording GPU activity; "
                    f"autoprof cleared it for this run ({foreign.KEEP}=1 keeps it)"
                )
            if run.settings.compares:
                from autoprof.windows import monitor, stats  # noqa: F401  as for dispatch

                stats.attach(run)
            if watcher.hang_limits(run.settings.when)[0]:
                # Torch reads these variables when it makes the first process group, long after its import.
                snapshot.enable_flight_record(os.environ)
            if run.settings.memory.oom:
                memory.watch_out_of_memory(run, recorder.subject)
            if run.started_here or not _boot.COMMAND.ray_worker:
                _state.register_at_exit()
        _state.joined = True
    return run
