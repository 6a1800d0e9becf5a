"""Dataclasses, enums, NamedTuples, generics and protocols around a trainer."""

import dataclasses
import enum
import typing

from tinyrl import Trainer, score

T = typing.TypeVar("T")


@dataclasses.dataclass(eq=True, order=True)
class Config(Trainer):
    name: str = "config"
    seen: list = dataclasses.field(default_factory=list)
    global_step: int = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    scorer: typing.Callable = score
    update = Trainer.update


class Stage(enum.Enum):
    UPDATE = 1

    def run(self):
        return Trainer().update(lambda: self)


class Generic(Trainer, typing.Generic[T]):
    pass


@typing.runtime_checkable
class Updates(typing.Protocol):
    def update(self, inside=None): ...


class Row(typing.NamedTuple):
    scores: list = score(["a"])


config = Config()
print(config.fit(), config, config == Config(), dataclasses.asdict(config), dataclasses.replace(config, name="x"))
print(Frozen().scorer(["abc"]), Frozen().update(), Frozen() == Frozen(), hash(Frozen()) == hash(Frozen()))
print(Stage.UPDATE.run(), Generic[int]().fit(), Generic[int].__origin__.__name__, isinstance(Trainer(), Updates), Row())
