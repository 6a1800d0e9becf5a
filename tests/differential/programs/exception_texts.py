#: python: {script} prints
#: python: {script} exits
#: python: {script} interrupts
#: python: {script} asks
"""Number of calls of `__str__` and `__repr__` of the program's exceptions and their arguments."""

import sys

from tinyrl import Trainer, blocks, evaluate


class Value:
    def __repr__(self):
        print("the argument is shown")
        return "a value"


class Prints(Exception):
    def __str__(self):
        print("__str__ is called")
        return "its text"

    def __repr__(self):
        print("__repr__ is called")
        return "its text"


class Exits(Exception):
    def __str__(self):
        sys.exit(7)


class Interrupts(Exception):
    def __str__(self):
        raise KeyboardInterrupt


class Asks(Exception):
    def __getattribute__(self, name):
        print(f"{name} is read")
        return super().__getattribute__(name)


def raise_from(error):
    try:
        raise Prints("first")
    except Prints:
        raise error


def raise_it(error):
    raise error


def in_block(error):
    with blocks.locked():
        raise error


def caught(work, error):
    for call in (Trainer().update, Trainer().fit, evaluate, Trainer().generate):
        try:
            call(inside=lambda: work(error))
        except BaseException as found:
            print(found is error)


for work in (raise_it, raise_from, in_block):
    caught(work, ValueError(Value()))
    caught(work, ValueError("several", [Value()]))
    caught(work, RuntimeError(Prints("inner")))
    caught(work, ExceptionGroup("group", [Prints("inner"), Exits()]))
    for kind in (Prints, Exits, Interrupts, Asks):
        caught(work, kind("text"))
uncaught = {"prints": Prints, "exits": Exits, "interrupts": Interrupts, "asks": Asks}[sys.argv[1]]
Trainer().fit(inside=lambda: raise_it(uncaught("text")))
