"""faulthandler's and traceback's dumps of the stack of a stage."""

import faulthandler
import traceback

from tinyrl import Trainer


def dump():
    faulthandler.dump_traceback(all_threads=False)
    traceback.print_stack()
    print([frame.name for frame in traceback.extract_stack() if "autoprof" not in frame.filename])


Trainer().fit(1, dump)
