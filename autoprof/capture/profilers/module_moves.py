"""Moves of modules while torch records shapes.

A recording with shapes keeps weak references to the tensors of each operator until its result is freed, one with stacks
those to some parameters. `torch.utils.swap_tensors` refuses tensors that have any, and with it `Module.to` for the
parameters of `fully_shard` (torch 2.13, `InputOutputEncoder` in torch/csrc/profiler/collection.h; `THPVariable` in
torch/csrc/autograd/python_variable.cpp). So a move records no operators of its own, and where a parameter is held all
the same, the recording is ended and freed first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from autoprof.base import interrupts, log, process
from autoprof.base.originals import threading

# Words of AUTOPROF_CONTENTS with which operators hold their tensors, since `with_flops` records shapes, too. And those
# with which a recording refers to parameters at all.
HELD = frozenset(("shapes", "flops"))
REFERRED = HELD | {"stack"}


class _State(process.State):
    """The recording that moves of modules end or leave out.

    Attributes:
        free: Ends and frees what is recorded. The patches of torch call it, and stay as long as the process.
        recorded: The thread that is recorded with shapes, and what is called when a module moves in it.
    """

    free: Callable[[str], bool] | None = None

    def begin(self) -> None:
        self.recorded: tuple[int, Callable[[], None]] | None = None


_state = _State()
_moving = threading.local()


def allow(free: Callable[[str], bool]) -> None:
    """Let modules move in this process whatever is recorded.

    Args:
        free: Ends and frees what is recorded, for the reason that it is given; returns whether there was something.
    """
    if _state.free is None:
        _state.free = free
        import torch

        if hasattr(torch._C, "_swap_tensor_impl"):
            torch._C._swap_tensor_impl = _swapping(torch._C._swap_tensor_impl)
        if hasattr(torch.autograd, "_enable_record_function"):
            torch.nn.Module._apply = _moved(torch.nn.Module._apply)


def begin(moved: Callable[[], None]) -> None:
    """Note that this thread is recorded with shapes from here on. `moved` is called when a module moves."""
    _state.recorded = threading.get_ident(), moved


def end() -> None:
    """Note that nothing is recorded with shapes any more."""
    _state.recorded = None


def _swapping(swap: Callable[..., None]) -> Callable[..., None]:
    # It looks before it changes anything, so it may be called again. `swap_tensors` may not: it swaps attributes first.
    import torch

    compiling = torch.compiler.is_compiling

    @functools.wraps(swap)
    def swap_impl(*tensors: Any) -> None:
        if compiling():
            return swap(*tensors)
        try:
            return swap(*tensors)
        except RuntimeError as error:
            interrupts.pass_on(error)
            if not _freed():
                raise
        return swap(*tensors)

    return swap_impl


def _freed() -> bool:
    try:
        return _state.free is not None and _state.free(
            "the program swaps a parameter, which torch refuses during a recording"
        )
    except Exception as error:
        interrupts.pass_on(error)
        log.warning_once(f"a capture could not make way for a module's move: {type(error).__name__}: {error}")
        return False


def _moved(apply: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    record: Callable[[bool], None] = torch.autograd._enable_record_function
    # What torch.compile traces is the user's alone.
    compiling = torch.compiler.is_compiling

    @functools.wraps(apply)
    def _apply(*args: Any, **kwargs: Any) -> Any:
        recorded = None if compiling() else _state.recorded
        if recorded is None or recorded[0] != threading.get_ident() or getattr(_moving, "now", False):
            return apply(*args, **kwargs)
        recorded[1]()
        _moving.now = True
        record(False)
        try:
            return apply(*args, **kwargs)
        finally:
            record(True)
            _moving.now = False

    return _apply
