"""Hooks of the user for uncaught exceptions in the main thread, in threads and in destructors."""

import sys
import threading

from tinyrl import Trainer


def fail():
    raise LookupError("uncaught")


class Dies:
    def __del__(self):
        Trainer().update(fail)


sys.unraisablehook = lambda said: print("unraisable", said.exc_type, said.exc_value)
threading.excepthook = lambda said: print("thread", said.exc_type, said.exc_value, said.thread.name)
sys.excepthook = lambda kind, error, _: print("main", kind, error, repr(error.__context__))
Dies()
thread = threading.Thread(target=Trainer().update, args=(fail,), name="mine")
thread.start()
thread.join()
Trainer().update(fail)
