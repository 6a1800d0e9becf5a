"""Dumps of a stage's stack by faulthandler and traceback."""

import faulthandler
import traceback

from tinyrl import Trainer


def dump():
    faulthandler.dump_traceback(all_threads=False)
    traceback.print_stack()
    print([frame.name for frame in traceback.extract_stack() if "autoprof" not in frame.filename])


Trainer().fit(1, dump)
