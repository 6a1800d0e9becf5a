"""Trainers that are started as modules (`python -m package.trainer`), which nobody imports."""

from __future__ import annotations

from autoprof.hooks import patching
from autoprof.hooks.behaviour import Behaviour
from autoprof.hooks.call import CALL, Around, Call


class Main(Behaviour):
    """A function that the module which this process was started with calls before it makes its trainer.

    That module runs as `__main__`: hooks that name it are applied to that when the call begins.
    """

    def around(self, call: Call) -> Around:
        patching.patch_main()
        yield CALL
        return None
