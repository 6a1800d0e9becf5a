"""__init_subclass__, __set_name__, class decorators, and classes made by type()."""

from tinyrl import Trainer

made = []


class Registered(Trainer):
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__()
        made.append((cls.__name__, kwargs, "update" in vars(cls)))


class Named:
    def __set_name__(self, owner, name):
        made.append((owner.__name__, name))


def decorator(cls):
    for name in ("update", "generate"):
        setattr(cls, name, (lambda function: lambda self, *a: ("decorated", function(self, *a)))(getattr(cls, name)))
    return cls


@decorator
class One(Registered, flag=1):
    attribute = Named()

    def update(self, inside=None):
        return super().update(lambda: "one")


Two = type("Two", (Registered,), {"update": Trainer.update, "field": Named()}, flag=2)
print(One().fit(), Two().fit(lambda: 1) if False else Two().fit(1), made)
