"""Moves of modules while torch records shapes.

Until its result is freed, a recording with shapes keeps weak references to the tensors of each operator, and a
recording with stacks keeps some to parameters. `torch.utils.swap_tensors` refuses tensors with weak references. So
does `Module.to` for the parameters of `fully_shard` (torch 2.13, `InputOutputEncoder` in
torch/csrc/profiler/collection.h; `THPVariable` in torch/csrc/autograd/python_variable.cpp). Therefore the operators of
a move are not recorded. If a recording refers to a parameter nevertheless, it is ended and freed first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from autoprof.base import log, process, seam
from autoprof.base.originals import threading

# Contents with which a recording refers to the tensors of operators (`with_flops` records shapes, too), and contents
# with which it may refer to parameters.
HELD = frozenset(("shapes", "flops"))
REFERRED = HELD | {"stack"}


class _MovesState(process.State):
    """Recording that moves of modules may have to end.

    Attributes:
        free: Function that ends and frees the recording. torch's patched functions call it and are never restored.
        recorded: Thread that is recorded with shapes, and the function to call when a module moves in it.
    """

    free: Callable[[str], bool] | None = None

    def begin(self) -> None:
        self.recorded: tuple[int, Callable[[], None]] | None = None


_state = _MovesState()
_moving = threading.local()


def allow(free: Callable[[str], bool]) -> None:
    """Let modules move in this process during any recording.

    Args:
        free: Function that ends and frees the recording for a given reason. It returns False if there was none.
    """
    if _state.free is None:
        _state.free = free
        import torch

        if hasattr(torch._C, "_swap_tensor_impl"):
            torch._C._swap_tensor_impl = _swapping(torch._C._swap_tensor_impl)
        if hasattr(torch.autograd, "_enable_record_function"):
            torch.nn.Module._apply = _moved(torch.nn.Module._apply)


def begin(moved: Callable[[], None]) -> None:
    """Note that this thread is recorded with shapes from now on. `moved` is called when a module moves."""
    _state.recorded = threading.get_ident(), moved


def end() -> None:
    """Note that the recording with shapes has ended."""
    _state.recorded = None


def _swapping(swap: Callable[..., None]) -> Callable[..., None]:
    # This function checks before it changes anything, so it may be called again. `swap_tensors` swaps attributes first,
    # so it may not.
    import torch

    compiling = torch.compiler.is_compiling

    @functools.wraps(swap)
    def swap_impl(*tensors: Any) -> None:
        if compiling():
            return swap(*tensors)
        try:
            return swap(*tensors)
        except RuntimeError as error:
            seam.pass_on(error)
            if not _freed():
                raise
        return swap(*tensors)

    return swap_impl


def _freed() -> bool:
    freed = False
    with seam.guard("a capture could not make way for a module's move", log.error_once):
        if _state.free is not None:
            freed = _state.free("the program swaps a parameter, which torch refuses during a recording")
    return freed


def _moved(apply: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    record: Callable[[bool], None] = torch.autograd._enable_record_function
    # torch.compile must trace only the user's code.
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
