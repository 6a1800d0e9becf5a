"""Functions called at exit, with their order and threads."""

import atexit
import threading
import time
import weakref

atexit.register(print, "first registered")
from tinyrl import Trainer

atexit.register(print, "after the import")
Trainer().fit()
atexit.register(print, "after the steps")
atexit.register(lambda: print(Trainer().fit(1), "at exit"))


class Model:
    pass


model = Model()
weakref.finalize(model, print, "finalized")
threading._register_atexit(print, "before threads are joined")
thread = threading.Thread(target=lambda: (time.sleep(0.5), print(f"a thread {Trainer().fit(1)}")))
thread.start()
atexit.register(lambda: 1 / 0)
