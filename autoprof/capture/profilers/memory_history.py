"""Switch of the history of CUDA's caching allocator, of which a process has one.

`torch.cuda.memory._record_memory_history` gained parameters with almost every release (torch 2.1 to 2.13): a call takes
those that are there. Whoever else calls it in this process is noticed, and goes first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt

from autoprof.base import process
from autoprof.capture.profilers.arguments import taken
from autoprof.config.tool_options import MemoryOptions


class _State(process.State):
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


_state = _State()


def begin(options: MemoryOptions) -> None:
    """Record from here on; what was recorded before is forgotten.

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


def end() -> None:
    """Record no longer, or go on as outside of windows; what was recorded is forgotten. Another's history stays.

    Raises:
        Exception: torch refuses.
    """
    if _state.ours:
        _state.ours = False
        _switch()(enabled=None)
        if _state.standing is not None:
            begin(_state.standing)


def keep(options: MemoryOptions) -> None:
    """Record outside of windows, too, unless somebody else does.

    Raises:
        Exception: As in `begin`.
    """
    if not foreign():
        begin(options)
        _state.standing = options


def snapshot() -> dict[str, Any]:
    """Return the state of the allocator, and the history as far as it is recorded.

    Raises:
        Exception: The allocator in use can't be asked.
    """
    import torch.cuda.memory

    found: dict[str, Any] = torch.cuda.memory._snapshot()
    return found


def changes() -> int:
    """Return how often somebody else has switched the history of this process, since autoprof first did."""
    _switch()
    return _state.changes


def foreign() -> str:
    """Return why the history is left alone: it is somebody else's; or an empty text."""
    import torch

    # As torch's own CUDA graphs ask (torch 2.13, _inductor/cudagraph_trees.py).
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", bool)
    taken = _state.theirs or (not _state.ours and enabled())
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
    _state.changes += 1
    _state.theirs = (args[0] if args else kwargs.get("enabled", "all")) not in (None, False)
    # From here on it is the user's to switch.
    _state.ours, _state.standing = False, None
    return result
