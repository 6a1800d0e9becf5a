"""Composition root of the part that runs inside of a run."""

from __future__ import annotations

import datetime  # noqa: F401  # before msgspec, see below
import functools

from autoprof import _boot
from autoprof._boot import command
from autoprof.base import files, interrupts, log, process
from autoprof.base.originals import os, threading

# msgspec 0.22 imports `typing_extensions` and `datetime`, and ignores exceptions meanwhile, also those of a signal
# handler. If `datetime` is missing, msgspec crashes the process later.
with interrupts.suppress(ImportError):
    import typing_extensions  # noqa: F401
from autoprof.capture import cupti, lifecycle

# dispatch is for the first call of a hook, which imports nothing: a child that is forked meanwhile would wait forever
# for an import that another thread had begun.
from autoprof.hooks import dispatch, main_script, patching, recipe, registry, returned  # noqa: F401
from autoprof.run import end, process_state, runtime, seat, torchrun, watcher
from autoprof.run.runtime import Runtime


class _State(process.State):
    """The set-up of this process, done once, and its end, which in the process that started the run is the run's."""

    ends = process.RUN

    def begin(self) -> None:
        self.joined = False
        self.lock = threading.RLock()

    def in_child(self) -> None:
        self.lock = threading.RLock()

    def at_exit(self) -> None:
        if (run := runtime.current()) is None:
            return
        if files.exists(run.rundir.run_json) or seat.own_seat() is not None:
            end.end_run(run)
        elif _boot.starter() not in (None, os.getpid()):
            # The process that started the run says why it has no hook, and has to know about this one.
            with interrupts.suppress(OSError):
                run.hooks.leave()


_state = _State()


def load(target: str) -> None:
    """Read the recipes of `target` and have each hook applied when its module is imported, or now if it was.

    A wrong recipe is reported once and left out; the others go on.
    """
    run = join()
    if run is None:
        return
    hooks = registry.read_recipes(target)
    # A target may say itself when the module that runs is ready for its hooks, which costs nothing till then.
    by_itself = any(hook.hook.behaviour == "main" for hook in hooks)
    for hook in hooks:
        run.hooks.add(hook)
        if reason := registry.left_out(run, hook):
            run.hooks.skipped(hook, reason)
            continue
        if recipe.script(hook.hook.module):
            main_script.watch(hook)
        else:
            _boot.when_imported(hook.hook.module, functools.partial(patching.apply_to_module, hook))
            if main_script.runs(hook.hook.module) and not by_itself:
                main_script.watch(hook)


def join() -> Runtime | None:
    """Join the run, and the first time set up what lasts as long as the process."""
    if _state.joined:
        return runtime.current()
    run = runtime.start()
    with _state.lock:
        if run is not None and not _state.joined:
            if command.THIS.launcher:
                torchrun.watch()
            lifecycle.watch_others()
            if cupti.guard(run.settings.tool, os.environ) and run.started_here:
                log.warning(
                    f"{cupti.INJECTION} named libcupti, which keeps torch.profiler from recording GPU activity; "
                    f"autoprof cleared it for this run ({cupti.KEEP}=1 keeps it)"
                )
            if run.settings.compares:
                from autoprof.windows import monitor, stats  # noqa: F401  as for dispatch

                stats.attach(run)
            if watcher.hang_limits(run.settings.when)[0]:
                # Torch reads it with the first group of processes; the trainer imports it long before.
                process_state.enable_flight_record(os.environ)
            if run.settings.memory.oom:
                from autoprof.capture.profilers import memory

                memory.watch_out_of_memory(run, lifecycle.subject)
            if run.started_here or not command.THIS.ray_worker:
                _state.end_first()
        _state.joined = True
    return run
