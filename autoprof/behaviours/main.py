"""Trainers that are started as modules (`python -m package.trainer`), which nobody imports."""

from __future__ import annotations

from autoprof import importing
from autoprof.behaviours import Behaviour
from autoprof.wrapping import CALL, Around, Call


class Main(Behaviour):
    """A function that the module which this process was started with calls before it makes its trainer.

    That module runs as `__main__`: hooks that name it are applied to that when the call begins.
    """

    def around(self, call: Call) -> Around:
        importing.patch_main()
        yield CALL
        return None
