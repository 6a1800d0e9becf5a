#: functions:
"""Ends of a process."""

import atexit
import faulthandler
import os
import resource
import signal
import sys

from tinyrl import Trainer


def at_exit_raising():
    """Exit status after SystemExit or os._exit at exit."""
    Trainer().fit()
    atexit.register(os._exit, 9)
    atexit.register(sys.stdout.flush)
    atexit.register(Trainer().update, lambda: sys.exit(4))
    print("ends")


def hard_exit():
    """os._exit in a stage, with flushed output."""

    def leave():
        print("leaves", flush=True)
        print("is lost", end="")
        os._exit(5)

    Trainer().fit(inside=leave)
    sys.exit(1)


def interrupted():
    """Ctrl-C in a stage, which ends the program as without autoprof."""
    Trainer().fit(inside=lambda: os.kill(os.getpid(), signal.SIGINT))


def terminated():
    """SIGTERM in a stage, which ends the process by this signal."""
    print("begins", flush=True)
    Trainer().fit(inside=lambda: os.kill(os.getpid(), signal.SIGTERM))


def uncaught():
    """Uncaught exception: its traceback on stderr, and status 1."""
    atexit.register(print, "at exit")

    def fail():
        raise ConnectionError("lost") from OSError(5, "why")

    Trainer().fit(inside=fail)


#: ignore: ^(Extension modules:.*|Thread 0x.*most recent call first.:|  <no Python frame>|.*/run/watcher.py", line .*)?$
def aborting():
    """os.abort in a stage, with a traceback of faulthandler.

    autoprof's watcher is a further thread. It may be starting, without a Python frame, or not exist yet.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    Trainer().fit(inside=os.abort)


globals()[sys.argv[1]]()
