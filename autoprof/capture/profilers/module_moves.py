"""Support for programs that move a module (`Module.to`) while torch records shapes or stacks.

A recording with shapes keeps weak references to the tensors of each operator, until the result of the recording is
freed. A recording with stacks may keep weak references to parameters. `torch.utils.swap_tensors` refuses tensors that
have weak references, and so does `Module.to` for the parameters of `fully_shard` (torch 2.13, `InputOutputEncoder` in
torch/csrc/profiler/collection.h; `THPVariable` in torch/csrc/autograd/python_variable.cpp).

Therefore autoprof does not record the operators of a move. If a recording still refers to a parameter that the program
swaps, autoprof ends and frees the recording first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from autoprof.base import log, process, seam
from autoprof.base.originals import threading

# HELD: contents with which a recording refers to the tensors of operators (`with_flops` also records shapes).
# REFERRED: contents with which a recording may refer to parameters.
HELD = frozenset(("shapes", "flops"))
REFERRED = HELD | {"stack"}


class _MovesState(process.State):
    """The functions to call when the program moves a module during a recording of this process.

    Attributes:
        free: Function that ends and frees the recording; None until `allow` has wrapped torch's functions. The wrapped
            functions call it. torch's functions stay wrapped.
        recorded: Id of the thread that is recorded with shapes, and the function to call when a module moves in this
            thread. None if no thread is recorded with shapes.
    """

    free: Callable[[str], bool] | None = None

    def begin(self) -> None:
        self.recorded: tuple[int, Callable[[], None]] | None = None


_state = _MovesState()
_moving = threading.local()


def allow(free: Callable[[str], bool]) -> None:
    """Wrap torch's functions in this process so that a module can move during each recording.

    Args:
        free: Function that ends and frees the recording. Its argument is the reason. It returns False if there was no
            recording.
    """
    if _state.free is None:
        _state.free = free
        import torch

        if hasattr(torch._C, "_swap_tensor_impl"):
            torch._C._swap_tensor_impl = _swapping(torch._C._swap_tensor_impl)
        if hasattr(torch.autograd, "_enable_record_function"):
            torch.nn.Module._apply = _moved(torch.nn.Module._apply)


def begin(moved: Callable[[], None]) -> None:
    """Note that from now on this thread is recorded with shapes.

    Args:
        moved: Function to call when a module moves in this thread.
    """
    _state.recorded = threading.get_ident(), moved


def end() -> None:
    """Note that the recording with shapes has ended."""
    _state.recorded = None


def _swapping(swap: Callable[..., None]) -> Callable[..., None]:
    # torch's `swap` checks the tensors before it changes anything. So it may be called a second time after an error.
    # `swap_tensors` first swaps attributes, so it must not be called twice.
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
    # torch.compile must trace only the user's code, so the wrapper does nothing while torch.compile traces.
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
