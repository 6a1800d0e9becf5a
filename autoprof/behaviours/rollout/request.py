"""Request of a trainer to an engine, the same by Ray, RPC, HTTP and as SGLang's text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from autoprof.capture.subject import Subject
from autoprof.config import kinds, structs
from autoprof.config.settings import Settings
from autoprof.run.runtime import Runtime
from autoprof.run.span import Span

ROLE = "rollout"
# The beginning of autoprof's text in a request to SGLang (`output_dir`), and in the answer (`message`).
MARK = "autoprof:"


@structs.complete
class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Request to record a step, to stop, or to follow a trainer that leads.

    Attributes:
        action: `lead` says that the trainer opens the engine's windows from now on.
        step: Global step to record.
        replica: Number of the engine's replica.
        rank: First global rank that the replica owns.
        overrides: Settings that the window has of its own.
        replicas_in_one: Whether each data-parallel rank is an engine of its own, as in SGLang without attention data
            parallelism.
        reason: Why a stop ends the recording early, if it does.
        run: Run directory of the trainer that leads.
    """

    action: Literal["lead", "start", "stop"]
    step: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(default=0, name="global_step")
    replica: int = 0
    rank: int = 0
    overrides: dict[str, Any] = {}
    replicas_in_one: bool = False
    reason: str = ""
    run: str = ""

    @classmethod
    def read(cls, sent: dict[str, Any] | bytes | str) -> Request:
        """Read the output of `fields`, `body` or `text`.

        Raises:
            ValueError: It is no request.
        """
        if isinstance(sent, dict):
            return msgspec.convert(sent, cls)
        return msgspec.json.decode(sent.removeprefix(MARK) if isinstance(sent, str) else sent, type=cls)

    def fields(self) -> dict[str, Any]:
        """Return the request as an argument of a call by Ray or RPC: processes without autoprof can unpickle it."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields

    def body(self) -> bytes:
        """Return the request as the body of an HTTP request."""
        return msgspec.json.encode(self)

    def text(self) -> str:
        """Return the request as text that SGLang carries."""
        return MARK + self.body().decode()

    def settings(self, run: Runtime) -> Settings:
        """Return the settings of rollouts in this window."""
        return run.settings.overridden(self.overrides).for_role(ROLE)

    def subject(self, part: str, rank: int | None = None) -> Subject:
        """Return the subject of a capture of one part of the engine, with the replica's first rank if none is given."""
        rank = self.rank if rank is None else rank
        return Subject(
            step=self.step,
            role=ROLE,
            stage=ROLE,
            stage_kind=kinds.GENERATE,
            rank=rank,
            replica=self.replica,
            part=part,
        )

    def span(self, run: Runtime) -> Span:
        """Return the span of the engine's recording, which begins now."""
        ids = {"replica": self.replica}
        return Span(run.timeline, "window", ROLE, step=self.step, role=ROLE, rank=self.rank, ids=ids)
