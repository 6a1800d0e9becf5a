"""Reward plug-in of ms-swift, loaded by path."""

from swift.rewards import ORM, orms


class Length(ORM):
    """Reward that depends on the length."""

    def __call__(self, completions: list[str], **_: object) -> list[float]:
        return [float(len(completion) % 7) for completion in completions]


orms["length"] = Length
