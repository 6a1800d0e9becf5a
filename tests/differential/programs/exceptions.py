#: functions: together
"""Exceptions, recursion and generators."""

import asyncio
import ctypes
import resource
import sys
import threading
import traceback

from tinyrl import Trainer, evaluate


def base_exceptions():
    """Exceptions that are not subclasses of Exception: they pass through stages and can be caught outside."""

    class Mine(BaseException):
        pass

    def throw(error):
        raise error

    for error in (Mine("mine"), KeyboardInterrupt(), SystemExit(3), GeneratorExit(), asyncio.CancelledError("c")):
        for call in (Trainer().update, evaluate, Trainer().generate):
            try:
                call(throw, error)
            except BaseException as caught:
                print(type(caught), caught is error, caught.__context__)


def raising():
    """Exceptions of the user, which keep their cause, context and traceback."""

    def plain():
        raise ValueError("plain")

    def chained():
        try:
            plain()
        except ValueError as error:
            raise KeyError("chained") from error

    def within():
        try:
            plain()
        except ValueError:
            raise KeyError("within")

    def none():
        try:
            plain()
        except ValueError:
            raise KeyError("none") from None

    def noted():
        error = RuntimeError("noted")
        error.add_note("a note")
        raise error

    def grouped():
        raise ExceptionGroup("several", [ValueError(1), ExceptionGroup("inner", [KeyError(2)])])

    for work in (plain, chained, within, none, noted, grouped):
        for call in (Trainer().update, Trainer().fit, evaluate):
            try:
                call(inside=work)
            except Exception as error:
                print(
                    type(error), error.args, repr(error.__cause__), repr(error.__context__), error.__suppress_context__
                )
                traceback.print_exc()


#: alone:
def excepthooks():
    """Hooks of the user for uncaught exceptions in the main thread, in threads and in destructors."""

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


def recursion():
    """Recursion through stages, and endless recursion in a stage."""

    def down(depth):
        return evaluate(down, depth - 1) if depth else "bottom"

    print(down(50))

    def endless():
        return endless()

    for call in (Trainer().update, evaluate, Trainer().fit):
        try:
            call(inside=endless)
        except RecursionError as error:
            print(error, error.__context__, error.__cause__)
    print(down(5), Trainer().fit())

    def endless_through():
        return evaluate(endless_through)

    try:
        endless_through()
    except RecursionError:
        print("caught")
    print(Trainer().fit())


#: alone:
def recursion_above_the_limit():
    """Stages that begin with few frames left: any RecursionError is the program's own."""
    trainer = Trainer()
    trainer.fit()
    sys.setrecursionlimit(300)

    def deep(depth):
        if depth == 0:
            return trainer.update(lambda: "bottom")
        return deep(depth - 1)

    good = 0
    for depth in range(200, 310):
        try:
            good += deep(depth) == "bottom"
        except RecursionError as error:
            last = error
    print(good > 60, type(last).__name__, trainer.fit(1)[-1])


#: differs: a wrapped call uses two more frames of the recursion limit
def recursion_near_the_limit():
    """Recursion through a hooked function up to a limit that the program chose for its own frames."""

    def down(depth):
        return evaluate(down, depth - 1) if depth else "bottom"

    sys.setrecursionlimit(500)
    print(down(200))


def generators():
    """Generators that call stages, that run in stages, and that are closed early."""
    trainer = Trainer()

    def batches(count):
        try:
            for number in range(count):
                got = yield trainer.update(lambda number=number: number)
                if got:
                    print("got", got)
        except GeneratorExit:
            print("closed")
            raise
        finally:
            print("ends", trainer.update(lambda: "last"))
        return "returned"

    print(list(batches(3)))
    generator = batches(9)
    print(next(generator), generator.send("sent"), trainer.update(lambda: next(generator)))
    generator.close()
    generator = batches(2)
    next(generator)
    try:
        generator.throw(KeyError("thrown"))
    except KeyError as error:
        print(repr(error))
    made = evaluate(lambda: (each for each in range(3)))
    print(type(made).__name__, list(made))

    def delegates():
        print((yield from batches(1)))

    print(list(delegates()))
    try:
        evaluate(next, iter([]))
    except StopIteration as error:
        print("stop", error.args)

    def uses():
        yield evaluate(next, iter([]))

    try:
        list(uses())
    except RuntimeError as error:
        print(error, repr(error.__cause__))


def exceptions_from_other_threads():
    """PyThreadState_SetAsyncExc, which time-outs of threads use."""

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


def trace_that_raises():
    """Trace function that raises after some time, as time-outs do; the user gets each exception."""

    class Late(BaseException):
        pass

    def work():
        for _ in range(10):
            pass

    def trace(frame, event, argument):
        if event == "line" and frame.f_code is work.__code__:
            raise Late("in the work")
        return trace

    Trainer().fit()
    sys.settrace(trace)
    try:
        Trainer().update(work)
    except Late as error:
        sys.settrace(None)
        print(repr(error), error.__context__)
    print(sys.gettrace(), Trainer().fit())


#: captures: no
def little_memory():
    """MemoryError of the user in a stage, under a memory limit."""
    trainer = Trainer()
    trainer.fit()
    resource.setrlimit(resource.RLIMIT_AS, (2_000_000_000, 2_000_000_000))
    try:
        trainer.update(lambda: bytearray(3_000_000_000))
    except MemoryError as error:
        print(repr(error), error.__context__)
    print(trainer.fit())


for name in sys.argv[1].split(","):
    print(name)
    globals()[name]()
