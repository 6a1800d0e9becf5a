#: sometimes: the watcher is a thread that threading does not know, and sys._current_frames() does
"""The frames of all threads, in a stage."""

import sys
import threading

from tinyrl import Trainer


def dump():
    print([thread.name for thread in threading.enumerate()])
    print(sys._current_frames().keys() == {threading.get_ident()})


Trainer().fit(1, dump)
