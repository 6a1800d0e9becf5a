"""Answers of nodes about their parts of a run."""

from __future__ import annotations

import msgspec

from autoprof.base import log
from autoprof.rundir.records import Missing, NodeState, Size


class Answer(msgspec.Struct, kw_only=True):
    """The answer of a node about its part of a run (`remote.look`).

    It has paths with bytes and times, and of what is not complete the seconds since it was written to.
    """

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
        """Return the node as it is told of."""
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
        """Return something of this part that is not here."""
        return Missing(self.node, self.host, path, reason)

    @property
    def standing(self) -> str:
        """Return how the node stands, in the words of `NodeState`, if nothing is to be fetched from it; else empty."""
        if self.state == "absent":
            return "nothing" if self.autoprof else "no autoprof"
        return self.state if self.state != "there" else "here" if self.same else ""


_NAMED = 3


def warn_missing(missing: list[Missing], then: str) -> None:
    if missing:
        named = "; ".join(each.line for each in missing[:_NAMED])
        more = f"; and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        log.warning(f"collecting is not complete: {named}{more}; {then}")
