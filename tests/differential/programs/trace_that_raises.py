"""Trace function that raises after some time, as time-outs do; the user gets each exception."""

import sys

from tinyrl import Trainer


class Late(BaseException):
    pass


def work():
    for _ in range(10):
        pass


def trace(frame, event, argument):
    if event == "line" and frame.f_code is work.__code__:
        raise Late("in the work")
    return trace


Trainer().fit()
sys.settrace(trace)
try:
    Trainer().update(work)
except Late as error:
    sys.settrace(None)
    print(repr(error), error.__context__)
print(sys.gettrace(), Trainer().fit())
