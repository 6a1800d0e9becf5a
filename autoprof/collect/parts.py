"""What nodes say of their parts of a run."""

from __future__ import annotations

from typing import Annotated

import msgspec

from autoprof.collect.result import Missing, NodeState

Size = Annotated[int, msgspec.Meta(ge=0)]


class Answer(msgspec.Struct, kw_only=True):
    """What a node says of its part of a run (`remote.look`): paths with bytes and times, and what is not complete with
    how many seconds ago it was written to."""

    host: str = ""
    autoprof: bool = True
    state: str = "there"
    reason: str = ""
    same: bool = False
    disk: str = ""
    files: list[tuple[str, Size, int]] = []
    unfinished: list[tuple[str, float]] = []
    left_out: list[tuple[str, str]] = []
    more: bool = False


class Part(Answer, kw_only=True):
    """A node's part of a run."""

    node: str
    directory: str

    def state_of(self, state: str, fetched: int = 0) -> NodeState:
        """The node as it is told of."""
        size = sum(each[1] for each in self.files)
        return NodeState(
            id=self.node,
            host=self.host,
            state=state,
            directory=self.directory,
            files=len(self.files),
            bytes=size,
            fetched=fetched,
        )

    def missing(self, path: str, reason: str) -> Missing:
        """Something of this part that is not here."""
        return Missing(self.node, self.host, path, reason)

    @property
    def standing(self) -> str:
        """How the node stands, in the words of `NodeState`, if nothing is to be fetched from it; else empty."""
        if self.state == "absent":
            return "nothing" if self.autoprof else "no autoprof"
        return self.state if self.state != "there" else "here" if self.same else ""
