"""Trainers that are started as modules (`python -m package.trainer`), that others replace, and that are made."""

from __future__ import annotations

from autoprof.hooks import patching
from autoprof.hooks.behaviour import Behaviour
from autoprof.hooks.call import CALL, Around, Call
from autoprof.run.cluster import current_step


class Main(Behaviour):
    """A function that the module which this process was started with calls before it makes its trainer.

    That module runs as `__main__`: hooks that name it are applied to that when the call begins.
    """

    def around(self, call: Call) -> Around:
        patching.patch_main()
        yield CALL
        return None


class Replaced(Behaviour):
    """The call replaces functions and classes of other targets: their hooks are applied again, to what is there then.

    Attributes:
        targets: These targets, by their import names.
    """

    targets: list[str]

    def around(self, call: Call) -> Around:
        yield CALL
        patching.patch_again(self.targets)
        return None


class Trainer(Behaviour):
    """The call makes a trainer in this process: engines beside it leave it to the trainer to say which step it is."""

    def around(self, call: Call) -> Around:
        current_step.trainer_here()
        yield CALL
        return None
