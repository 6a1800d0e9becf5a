"""torch.profiler as a tool, and who else uses it in this process.

torch has one profiler a process: a second one starts without an error and empties the first. So `start` and `stop` of
`torch.profiler.profile` are watched, and autoprof yields to whoever else starts one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wrapt

_OWN = "_autoprof_own"
_foreign: weakref.WeakSet[Any] = weakref.WeakSet()
_interrupt: Callable[[str], None] | None = None


class TorchTool:
    """Records with `torch.profiler.profile` and writes a Chrome trace."""

    name = "torch"

    def __init__(self) -> None:
        self._profile: Any = None

    def start(self, contents: tuple[str, ...]) -> list[str]:
        arguments, unknown = profile_arguments(contents)
        import torch.profiler

        self._profile = torch.profiler.profile(**arguments)
        mark_own(self._profile)
        self._profile.start()
        return unknown

    def stop(self) -> None:
        self._profile.stop()

    def export(self, path: Path) -> None:
        self._profile.export_chrome_trace(str(path))
        self._profile = None

    def busy(self) -> str:
        return "another torch.profiler is recording in this process" if len(_foreign) else ""


def profile_arguments(contents: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """The arguments of `torch.profiler.profile` for `contents`, and what of it this build of torch does not know.

    Empty `contents` mean the host and every device that torch was built for.
    """
    import torch.profiler

    activities = {activity.name.lower(): activity for activity in torch.profiler.supported_activities()}
    devices = {"cpu": "cpu", "cuda": "cuda", "npu": "privateuse1"}
    flags = {
        "shapes": "record_shapes",
        "memory": "profile_memory",
        "stack": "with_stack",
        "flops": "with_flops",
        "module": "with_modules",
    }
    asked = [devices[word] for word in contents if word in devices] or list(activities)
    unknown = [word for word in contents if devices.get(word, "cpu") not in activities]
    unknown += [word for word in contents if word not in devices and word not in flags]
    chosen = [activities[name] for name in asked if name in activities] or [activities["cpu"]]
    return {"activities": chosen} | {flags[word]: True for word in contents if word in flags}, unknown


def mark_own(profile: Any, own: bool = True) -> None:
    """Tell the watch that a `torch.profiler.profile` is autoprof's, or no longer."""
    setattr(profile, _OWN, own)


def watch(interrupt: Callable[[str], None]) -> None:
    """Call `interrupt` with a reason before anyone else's profiler starts. Takes effect when torch is imported."""
    global _interrupt
    if _interrupt is None:
        _interrupt = interrupt
        wrapt.register_post_import_hook(_watch_module, "torch.profiler.profiler")


def _watch_module(module: Any) -> None:
    try:
        wrapt.wrap_function_wrapper(module, "profile.start", _start)
        wrapt.wrap_function_wrapper(module, "profile.stop", _stop)
    except Exception as error:
        from autoprof import runtime

        runtime.report("torch.profiler", error)


def _start(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if not getattr(instance, _OWN, False):
        try:
            if _interrupt is not None:
                _interrupt("another torch.profiler was started in this process")
            _foreign.add(instance)
        except Exception as error:
            from autoprof import runtime

            runtime.report("torch.profiler", error)
    return wrapped(*args, **kwargs)


def _stop(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    _foreign.discard(instance)
    return wrapped(*args, **kwargs)


def version() -> str:
    """The version of torch, if it was imported."""
    return str(getattr(sys.modules.get("torch"), "__version__", ""))
