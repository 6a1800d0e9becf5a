#: needs: beartype
"""Hooked functions decorated with beartype."""

from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from tinyrl import Trainer


@beartype
class Mine(Trainer):
    def update(self, inside=None, *args: int) -> int:
        return super().update(lambda: 5)

    def generate(self, inside=None) -> str:
        return super().generate(lambda: 5)


print(Mine().update())
try:
    Mine().fit()
except BeartypeCallHintViolation as error:
    print(type(error).__name__)
print(beartype(Trainer.update)(Trainer(), lambda: 3))
