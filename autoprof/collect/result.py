"""What collecting a run came to."""

from __future__ import annotations

import msgspec


class Missing(msgspec.Struct, frozen=True):
    """Something of the run that is not here. `path` is empty where it is all that a node left."""

    node: str
    host: str
    path: str
    reason: str

    @property
    def line(self) -> str:
        """It in words."""
        where = f"{self.host} ({self.node[:8]})" if self.node else ""
        return ": ".join(filter(None, [where, self.path, self.reason]))


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the cluster, and what of the run it has.

    Attributes:
        state: `here`, its disk is this one; `collected`; `incomplete`, something is missing; `nothing`, the run left
            nothing there; `no autoprof`, nor could it; `dead`; `no answer`; `unreadable`.
        files: How many files its part has; of those that are here already, too.
        fetched: The bytes that came now.
    """

    id: str
    host: str
    state: str
    directory: str
    files: int = 0
    bytes: int = 0
    fetched: int = 0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What is here, and what is not.

    Attributes:
        left_out: What was not meant to come: links, names that lead elsewhere.
    """

    run: str
    directory: str
    nodes: list[NodeState]
    missing: list[Missing] = []
    left_out: list[Missing] = []

    @property
    def fetched(self) -> int:
        return sum(node.fetched for node in self.nodes)
