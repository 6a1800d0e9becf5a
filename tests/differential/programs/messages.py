#: functions:
"""Warnings, logs, traces, profiles, debuggers and random numbers."""

import cProfile
import io
import logging
import pdb
import pstats
import random
import sys
import threading
import timeit
import trace
import uuid
import warnings

from tinyrl import Trainer


#: differs: stacklevel counts the wrapper's frames, so the warning names a line of autoprof
def warnings_of_callers():
    """Warning of a hooked function that names the line of its caller."""

    class Mine(Trainer):
        pass

    def old(*args):
        warnings.warn("update(inside) is deprecated", DeprecationWarning, stacklevel=3)

    Trainer().update(old)
    Trainer().update(old)


def warnings_of_stages():
    """Warnings in stages, shown once for each place."""

    def warn():
        warnings.warn("from inside", UserWarning)
        warnings.warn("deprecated", DeprecationWarning)

    Trainer().fit(inside=warn)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer().fit(inside=warn)
    print([(str(each.message), each.lineno) for each in caught])


def warnings_state():
    """Filters of warnings, their registries, and warnings shown only once."""
    before = list(warnings.filters)
    Trainer().fit()
    print(warnings.filters == before, warnings.showwarning.__module__, sys.warnoptions)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        print(Trainer().fit(1))
        try:
            Trainer().fit(1, lambda: warnings.warn("now an error"))
        except UserWarning as error:
            print(repr(error))
    for _ in range(3):
        Trainer().fit(1, lambda: warnings.warn("once"))


def logging_as_it_was():
    """Root logger of the user with its handlers and levels."""
    print(logging.root.handlers, logging.root.level, logging.lastResort.level, logging.getLogger().hasHandlers())
    Trainer().fit(inside=lambda: logging.getLogger("mine").warning("before basicConfig"))
    logging.basicConfig(format="%(levelname)s %(name)s %(funcName)s %(message)s", level="DEBUG", stream=sys.stdout)
    print(len(logging.root.handlers))

    def say():
        logging.info("from a stage")
        logging.getLogger("tinyrl").debug("debug")

    Trainer().fit(inside=say)
    logging.shutdown()


#: differs: stacklevel counts the wrapper's frames, so the record names a function of autoprof
def logging_callers():
    """Log record with the caller of a hooked function."""
    logging.basicConfig(format="%(filename)s %(funcName)s %(message)s", stream=sys.stdout)

    def step():
        Trainer().update(lambda: logging.warning("called", stacklevel=3))

    step()


#: stdin: c
def debugging():
    """breakpoint() in a stage, with pdb and with a hook of the user."""
    sys.breakpointhook = lambda *args: print("broken", args)
    Trainer().fit(inside=breakpoint)
    sys.breakpointhook = sys.__breakpointhook__

    def stop():
        pdb.Pdb(nosigint=True, readrc=False).set_trace()
        return "goes on"

    print(Trainer().update(stop))


def tracing():
    """sys.settrace and sys.setprofile of the user, set before and in stages."""
    seen = []

    def trace(frame, event, argument):
        if "tinyrl" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
            seen.append((frame.f_code.co_name, event))
        return trace

    Trainer().fit()
    sys.settrace(trace)
    Trainer().fit(1)
    sys.settrace(None)
    print(seen)
    seen.clear()

    def profile(frame, event, argument):
        if "tinyrl" in frame.f_code.co_filename and event in ("call", "return"):
            seen.append((frame.f_code.co_name, event))

    sys.setprofile(profile)
    Trainer().fit(1)
    print(sys.getprofile() is profile, sys.gettrace())
    sys.setprofile(None)
    print(seen)
    seen.clear()
    Trainer().update(lambda: sys.setprofile(profile))
    Trainer().update(lambda: None)
    Trainer().update(lambda: sys.setprofile(None))
    print(seen)
    threading.setprofile(profile)
    threading.settrace(trace)
    seen.clear()
    thread = threading.Thread(target=Trainer().update)
    thread.start()
    thread.join()
    print(seen, threading.getprofile() is profile)


#: captures: no
def profiling():
    """cProfile, profile, trace, pdb and timeit of a program with stages."""
    profiler = cProfile.Profile()
    print(profiler.runcall(Trainer().fit))
    stats = pstats.Stats(profiler, stream=io.StringIO())
    # Count only non-recursive calls: from 3.12 on, the profiler mixes the calls of all threads.
    print(sorted((key[2], value[0]) for key, value in stats.stats.items() if key[0].endswith("trainer.py")))
    tracer = trace.Trace(count=1, trace=0)
    tracer.runfunc(Trainer().fit)
    counted = tracer.results().counts
    print(sorted((line, count) for (path, line), count in counted.items() if path.endswith("trainer.py")))
    print(timeit.timeit("Trainer().fit()", globals=globals(), number=3) > 0)


#: set: PYTHONHASHSEED=0
def randomness():
    """Random numbers with a seed, which stages do not change."""
    random.seed(1)
    print(Trainer().fit(inside=random.random), random.getstate()[1][:3], hash("a"), len(str(uuid.uuid4())))
    print(random.Random(3).random(), [id(a) == id(a) for a in "ab"], list({"a", "b", "c", "d"}))


globals()[sys.argv[1]]()
