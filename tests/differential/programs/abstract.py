"""Abstract base classes, virtual subclasses, and a metaclass of a trainer."""

import abc

from tinyrl import Trainer


class Base(abc.ABC):
    @abc.abstractmethod
    def update(self, inside=None): ...

    @classmethod
    def __subclasshook__(cls, other):
        return "extra" in vars(other) or NotImplemented


class Mine(Trainer, Base):
    pass


class Missing(Base):
    pass


Base.register(Trainer)
print(Mine().fit(), isinstance(Trainer(), Base), issubclass(Mine, Base), Mine.__abstractmethods__)
try:
    Missing()
except TypeError as error:
    print(error)


class Meta(abc.ABCMeta):
    def __new__(mcs, name, bases, body):
        body["made"] = sorted(key for key in body if not key.startswith("_"))
        return super().__new__(mcs, name, bases, body)

    def __call__(cls, *args):
        return super().__call__(*args)


class Other(Trainer, metaclass=Meta):
    def update(self, inside=None):
        return super().update(lambda: "other")


print(Other().fit(), Other.made, type(Other).__name__)
