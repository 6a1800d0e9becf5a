"""PyThreadState_SetAsyncExc, which time-outs of threads use."""

import ctypes
import threading

from tinyrl import Trainer


class Late(Exception):
    pass


ready, found = threading.Event(), []


def spin():
    ready.set()
    while True:
        pass


def work():
    try:
        Trainer().update(spin)
    except Late as error:
        found.append((repr(error), error.__context__))


Trainer().fit()
thread = threading.Thread(target=work)
thread.start()
ready.wait()
print(ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Late)))
thread.join()
print(found)
