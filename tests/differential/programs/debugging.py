#: stdin: c
"""breakpoint() in a stage, with pdb and with a hook of the user."""

import pdb
import sys

from tinyrl import Trainer

sys.breakpointhook = lambda *args: print("broken", args)
Trainer().fit(inside=breakpoint)
sys.breakpointhook = sys.__breakpointhook__


def stop():
    pdb.Pdb(nosigint=True, readrc=False).set_trace()
    return "goes on"


print(Trainer().update(stop))
