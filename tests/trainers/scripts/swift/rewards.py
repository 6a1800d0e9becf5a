"""A reward of ms-swift's plug-in kind, loaded by its path."""

from swift.rewards import ORM, orms


class Length(ORM):
    """Rewards by length."""

    def __call__(self, completions: list[str], **_: object) -> list[float]:
        return [float(len(completion) % 7) for completion in completions]


orms["length"] = Length
