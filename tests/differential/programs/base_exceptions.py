"""Exceptions that are not subclasses of Exception: they pass through stages and can be caught outside."""

import asyncio

from tinyrl import Trainer, evaluate


class Mine(BaseException):
    pass


def throw(error):
    raise error


for error in (Mine("mine"), KeyboardInterrupt(), SystemExit(3), GeneratorExit(), asyncio.CancelledError("c")):
    for call in (Trainer().update, evaluate, Trainer().generate):
        try:
            call(throw, error)
        except BaseException as caught:
            print(type(caught), caught is error, caught.__context__)
