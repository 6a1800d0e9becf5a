"""Properties of the process: niceness, affinity, limits, session, dumpable, title."""

import os
import resource
import sys
import threading

from tinyrl import Trainer


def look():
    limits = [resource.getrlimit(getattr(resource, name)) for name in sorted(dir(resource)) if "RLIMIT_" in name]
    print(os.nice(0), len(os.sched_getaffinity(0)), limits, os.getpgid(0) == os.getpid(), threading.active_count())
    print(open("/proc/self/cmdline").read().split("\0")[-2], sys.getswitchinterval(), sys.getrecursionlimit())
    print(sys.get_int_max_str_digits(), sys.getdlopenflags(), sys.get_asyncgen_hooks(), sys.flags.hash_randomization)


look()
Trainer().fit(1, look)
look()
