"""Steps in workers that are plain processes: the trainer's calls of them carry the step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from autoprof.behaviours.trainer import stage_pairs
from autoprof.capture import whole_step
from autoprof.hooks.attribute_path import CallPath, Parameter
from autoprof.hooks.behaviour import Behaviour
from autoprof.hooks.call import CALL, Around, Call
from autoprof.run import runtime
from autoprof.run.cluster import current_step

# The key in the dictionary that the call carries.
_KEY = "autoprof"


class Send(Behaviour):
    """The trainer calls a worker that is a plain process: the step travels in a dictionary that the call carries, such
    as the headers of a request. A `step.receive` hook takes it out in the worker.

    Attributes:
        carrier: The keyword parameter that takes the dictionary, or nothing. The target must let keys pass that it does
            not know.
    """

    carrier: Parameter

    def around(self, call: Call) -> Around:
        if runtime.current() is not None and _takes_keyword(call, self.carrier):
            carried = call.argument(self.carrier)
            if carried is None or type(carried) is dict:
                call.kwargs[self.carrier] = {**(carried or {}), _KEY: current_step.parcel()}
        yield CALL
        return None


class Receive(Behaviour):
    """Made in a worker for each call of the trainer's, before its work: the step that a `step.send` hook sent arrives.

    Attributes:
        carrier: Path from a parameter of the call to the dictionary.
    """

    carrier: CallPath

    def around(self, call: Call) -> Around:
        run, carried = runtime.current(), call.at(self.carrier, None)
        if run is not None and isinstance(carried, Mapping) and _KEY in carried and current_step.receive(carried[_KEY]):
            stage_pairs.end_all()
            now = current_step.here()
            next_too = now is not None and now.captured and run.settings.consecutive == whole_step.TOGETHER
            whole_step.step_ended(together=next_too)
        yield CALL
        return None


def _takes_keyword(call: Call, name: str) -> bool:
    """Return whether the call may get the argument by its name: it was not given by position."""
    if name in call.kwargs:
        return True
    found = inspect.signature(call.function).parameters.get(name)
    return found is not None and found.kind is inspect.Parameter.KEYWORD_ONLY
