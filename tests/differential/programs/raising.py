"""Exceptions of the user, which keep their cause, context and traceback."""

import traceback

from tinyrl import Trainer, evaluate


def plain():
    raise ValueError("plain")


def chained():
    try:
        plain()
    except ValueError as error:
        raise KeyError("chained") from error


def within():
    try:
        plain()
    except ValueError:
        raise KeyError("within")


def none():
    try:
        plain()
    except ValueError:
        raise KeyError("none") from None


def noted():
    error = RuntimeError("noted")
    error.add_note("a note")
    raise error


def grouped():
    raise ExceptionGroup("several", [ValueError(1), ExceptionGroup("inner", [KeyError(2)])])


for work in (plain, chained, within, none, noted, grouped):
    for call in (Trainer().update, Trainer().fit, evaluate):
        try:
            call(inside=work)
        except Exception as error:
            print(type(error), error.args, repr(error.__cause__), repr(error.__context__), error.__suppress_context__)
            traceback.print_exc()
