"""Stand-ins for packages that SGLang imports at module level but does not use on a CPU.

With `attention_backend="torch_native"` and `sampling_backend="pytorch"`, SGLang calls no kernel of these packages. It
does use their decorators, base classes, annotations and constants. The packages need CUDA or have 1 GB each. An
installed package takes precedence, because the finder is the last one.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

# Versions of packages whose version SGLang checks.
VERSIONS = {"torchao": "0.15.0", "torchaudio": "2.13.0", "torchvision": "0.28.0", "triton": "3.6.0"}
PACKAGES = {
    "cuda",
    "decord",
    "flashinfer",
    "gguf",
    "llguidance",
    "outlines",
    "sgl_kernel",
    "torchao",
    "torchaudio",
    "torchvision",
    "triton",
    "xgrammar",
}


class Anything:
    """Stand-in for a function, class, decorator, type or number of such a package."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "stand_ins"

    def __getattr__(self, name: str) -> Anything:
        # Special methods must seem to be absent, since other code checks for them.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Anything(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], (types.FunctionType, type)):
            return args[0]  # a decorator
        return Anything(f"{self.__name__}()")

    def __getitem__(self, key: Any) -> Anything:
        return Anything(f"{self.__name__}[]")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __subclasscheck__(self, subclass: Any) -> bool:
        return False

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        # xgrammar.StructuralTag is a field of a pydantic model (entrypoints/openai/protocol.py).
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __or__(self, other: Any) -> Any:
        return other  # an annotation, `X | None`

    __ror__ = __or__

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __index__(self) -> int:
        return 0

    def _zero(self, *others: Any) -> int:
        return 0

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __truediv__ = _zero

    def _no(self, other: Any) -> bool:
        return False

    __lt__ = __le__ = __gt__ = __ge__ = _no

    def __eq__(self, other: Any) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class _NoDriver:
    """Triton's driver on a machine without a device. It raises, so that linear attention uses its fallback."""

    @property
    def active(self) -> Any:
        raise RuntimeError("0 active drivers")


class StandIn(types.ModuleType):
    """Module that has every name."""

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        found = Anything(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder that makes a stand-in for each module of PACKAGES that no other finder has."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES or _asked_by_torch_or_for_a_look():
            return None
        if fullname == "triton" and "torch" in sys.modules:
            _tell_torch_there_is_no_triton()
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = StandIn(spec.name)
        module.__version__ = VERSIONS.get(spec.name, "0.0.0")
        if spec.name == "triton":
            # SGLang calls these on import, in the defaults of kernels.
            module.cdiv = lambda a, b: -(-a // b)
            module.next_power_of_2 = lambda n: 1 << (max(int(n), 1) - 1).bit_length()
            module.runtime = Anything("triton.runtime")
            module.runtime.driver = _NoDriver()
        elif spec.name == "triton.runtime":
            module.driver = _NoDriver()
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module has no code."""


def _asked_by_torch_or_for_a_look() -> bool:
    """Return True if the import comes from torch, or from `importlib.util.find_spec`.

    torch's compiler would use a stand-in of triton, and transformers treats any package that find_spec finds as
    installed.
    """
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and "importlib._bootstrap" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return False
    looks = frame.f_code.co_name == "find_spec" and "importlib" in frame.f_code.co_filename
    return looks or str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def _tell_torch_there_is_no_triton() -> None:
    """Let torch look for triton before the stand-in exists; torch 2.13 caches the answer."""
    import torch._inductor.runtime.triton_compat
    import torch.utils._triton

    torch.utils._triton.has_triton_package()


def install() -> None:
    """Append the finder to the finders of imports."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
