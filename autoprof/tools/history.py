"""Switches the history of CUDA's caching allocator, of which a process has one, on and off.

`torch.cuda.memory._record_memory_history` gained parameters with almost every release (torch 2.1 to 2.13): a call takes
those that are there. Whoever else calls it in this process is noticed, and goes first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt

from autoprof.options import MemoryOptions
from autoprof.tools.npu import taken

# How often somebody else has switched the history of this process, and whether it is theirs now.
_changes = 0
_theirs = False
_ours = False
# What the history goes on with outside of windows, where it is kept for when memory runs out.
_standing: MemoryOptions | None = None


def begin(options: MemoryOptions) -> None:
    """Record from here on; what was recorded before is forgotten.

    Raises:
        Exception: This torch, or the allocator in use, records no history.
    """
    global _ours
    switch = _switch()
    if _ours:
        switch(enabled=None)
    arguments = _arguments(switch, options)
    if "max_entries" not in arguments:
        raise RuntimeError("this torch can't bound the memory history")
    switch(**arguments)
    _ours = True


def end() -> None:
    """Record no longer, or go on as outside of windows; what was recorded is forgotten. Another's history stays.

    Raises:
        Exception: torch refuses.
    """
    global _ours
    if _ours:
        _ours = False
        _switch()(enabled=None)
        if _standing is not None:
            begin(_standing)


def keep(options: MemoryOptions) -> None:
    """Record outside of windows, too, unless somebody else does.

    Raises:
        Exception: As in `begin`.
    """
    global _standing
    if not foreign():
        begin(options)
        _standing = options


def snapshot() -> dict[str, Any]:
    """The state of the allocator, and the history as far as it is recorded.

    Raises:
        Exception: The allocator in use can't be asked.
    """
    import torch.cuda.memory

    found: dict[str, Any] = torch.cuda.memory._snapshot()
    return found


def changes() -> int:
    """How often somebody else has switched the history of this process, since autoprof first did."""
    _switch()
    return _changes


def foreign() -> str:
    """Why the history is left alone: it is somebody else's; or an empty text."""
    import torch

    # As torch's own CUDA graphs ask (torch 2.13, _inductor/cudagraph_trees.py).
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", bool)
    taken = _theirs or (not _ours and enabled())
    return "something else records the memory history of this process" if taken else ""


def _arguments(switch: Callable[..., None], options: MemoryOptions) -> dict[str, Any]:
    """What `_record_memory_history` is called with, as far as it takes it: a build of torch may lack some."""
    asked: dict[str, Any] = {"enabled": "all", "max_entries": options.max_entries}
    if options.stacks == "none":
        asked |= {"context": None, "stacks": "python"}
    else:
        asked |= {"context": "all", "stacks": options.stacks}
    return taken(switch, asked)


def _switch() -> Callable[..., None]:
    """torch's own function, behind the watch that is put on it here."""
    import torch.cuda.memory as module

    watched = module._record_memory_history
    if getattr(watched, "_self_wrapper", None) is not _called:
        wrapt.wrap_function_wrapper(module, "_record_memory_history", _called)
        watched = module._record_memory_history
    switch: Callable[..., None] = watched.__wrapped__
    return switch


def _called(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    global _changes, _theirs, _ours, _standing
    result = wrapped(*args, **kwargs)
    _changes += 1
    _theirs = (args[0] if args else kwargs.get("enabled", "all")) not in (None, False)
    # From here on it is the user's to switch.
    _ours, _standing = False, None
    return result
