"""Steps told by a trainer's counter, for trainers that make no call between two steps."""

from __future__ import annotations

from typing import Any

from autoprof.base import interrupts
from autoprof.behaviours.trainer.open_step import finish
from autoprof.behaviours.trainer.steps import StepBehaviour
from autoprof.hooks.attribute_path import CallPath
from autoprof.hooks.call import CALL, Around, Call
from autoprof.hooks.wrapper import wrap


class Counter(StepBehaviour):
    """An attribute of the trainer that is one higher in each step: a step is open from one increase to the next.

    Setting it to anything else, such as 0 at first or the number of a checkpoint, begins no step. The hook's function
    is the assignment, whose parameters are `self` and `value`.

    Attributes:
        last: Path to the number of the last step, beyond which a trainer may count once more before it ends.
    """

    last: CallPath = ""

    def around(self, call: Call) -> Around:
        name, instance, value = call.function.__name__, call.args[0], call.args[1]
        before = vars(instance).get(name)
        yield CALL
        if before is not None and value == before + 1:
            if self.last and self.number_of(call) > int(call.at(self.last)):
                yield from finish()
            else:
                yield from self.begin(call)
        return None

    def supply(self, owner: type, name: str, key: str) -> bool:
        def get(self: Any) -> Any:
            try:
                return vars(self)[name]
            except KeyError as error:
                interrupts.pass_on(error)
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

        def assign(self: Any, value: Any) -> None:
            vars(self)[name] = value

        def delete(self: Any) -> None:
            vars(self).pop(name, None)

        assign.__name__ = name
        setattr(owner, name, property(get, wrap(assign, key), delete))
        return True
