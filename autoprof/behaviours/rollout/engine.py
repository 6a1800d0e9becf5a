"""Server actors of engines that a trainer drives, which receive its requests."""

from __future__ import annotations

from collections import abc
from typing import Any, ClassVar

from autoprof.base import interrupts
from autoprof.behaviours.rollout.request import Request
from autoprof.hooks.attribute_path import CallPath
from autoprof.hooks.behaviour import Behaviour
from autoprof.hooks.call import CALL, Around, Call, Reply
from autoprof.hooks.waits import Coroutine


class Server(Behaviour):
    """Method of the server actor that takes any keyword: a call with `autoprof=` is a request of the trainer's.

    Attributes:
        engine: Path from a parameter of the call to the engine; None where it stands on a node that has none.
        node_rank: Path to the actor's number in a replica over several nodes; only 0 has an engine.
    """

    default_engine: ClassVar[str]

    engine: CallPath = ""
    node_rank: CallPath = "self.node_rank"

    def around(self, call: Call) -> Around:
        asked = call.kwargs.get("autoprof")
        if asked is None:
            yield CALL
            return None
        if call.at(self.node_rank, 0) != 0:
            return Reply({})
        try:
            engine = call.at(self.engine or self.default_engine)
            if engine is None:
                return Reply({})
            request = Request.read(asked)
            answer = yield Coroutine(self.start(engine, request) if request.action == "start" else self.stop(engine))
        except Exception as error:
            interrupts.pass_on(error)
            return Reply({"problem": f"{type(error).__name__}: {error}"})
        return Reply(answer)

    def supply(self, owner: type, name: str, key: str) -> bool:
        """Add the method to a server class that has none (verl 0.5.0 to 0.7.0).

        It is shipped by value, so it refers to nothing, and answers as a node without an engine where autoprof is not.
        """

        async def method(self: Any, **kwargs: Any) -> dict[str, Any]:
            return {}

        method.__module__ = owner.__module__
        method.__name__, method.__qualname__ = name, f"{owner.__qualname__}.{name}"
        setattr(owner, name, method)
        return True

    def start(self, engine: Any, request: Request) -> abc.Coroutine[Any, Any, dict[str, Any]]:
        """Have the engine record; the answer has a problem, or an empty text."""
        raise NotImplementedError

    def stop(self, engine: Any) -> abc.Coroutine[Any, Any, dict[str, Any]]:
        """Have the engine stop; the answer has a problem, or an empty text."""
        raise NotImplementedError
