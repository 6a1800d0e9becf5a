#: functions:
"""SIGTERM with and without handlers: in the process, in threads and in child processes."""

import asyncio
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

from tinyrl import Trainer

TERM = signal.SIGTERM
libc = ctypes.CDLL(None)


def _kill(pid=None):
    os.kill(pid or os.getpid(), TERM)


def _fork(work):
    """Return the status of a forked child that calls `work`."""
    pid = os.fork()
    if not pid:
        work()
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def handler_before():
    signal.signal(TERM, lambda number, frame: print("handled", number))
    Trainer().fit(inside=_kill)
    print(_fork(lambda: (_kill(), os._exit(3))))


def handler_after():
    print(signal.getsignal(TERM))
    Trainer().fit()
    print(signal.getsignal(TERM))
    old = signal.signal(TERM, lambda number, frame: print("handled", number))
    Trainer().fit(inside=_kill)
    print(old, signal.signal(TERM, old))
    _kill()


def handler_raises():
    def stop(number, frame):
        raise SystemExit(128 + number)

    Trainer().fit()
    signal.signal(TERM, stop)
    Trainer().fit(inside=_kill)


def ignored():
    Trainer().fit()
    signal.signal(TERM, signal.SIG_IGN)
    Trainer().fit(inside=_kill)
    # `raise` of C gets the exit status, SIGTERM, after the end of the interpreter.
    libc.on_exit(ctypes.cast(libc["raise"], ctypes.c_void_p), None)
    print(_fork(lambda: (_kill(), sys.exit(TERM))), flush=True)
    sys.exit(TERM)


def raised_after_the_end():
    Trainer().fit()
    libc.on_exit(ctypes.cast(libc["raise"], ctypes.c_void_p), None)
    sys.exit(TERM)


def handler_in_c():
    Trainer().fit()
    libc.signal(TERM, ctypes.cast(libc._exit, ctypes.c_void_p))
    print(signal.getsignal(TERM), _fork(_kill), _fork(lambda: Trainer().fit(inside=_kill)), flush=True)
    Trainer().fit(inside=_kill)


def own_faulthandler():
    Trainer().fit()
    faulthandler.register(TERM, all_threads=False)
    _kill()
    print(_fork(_kill), faulthandler.unregister(TERM), signal.getsignal(TERM), flush=True)
    _kill()


def own_faulthandler_that_chains():
    Trainer().fit()
    faulthandler.register(TERM, all_threads=False, chain=True)
    _kill()


def own_faulthandler_first():
    faulthandler.register(TERM, all_threads=False, chain=True)
    Trainer().fit()
    _kill()


#: differs: faulthandler sets its handler only once, so the program's handler stays
def own_faulthandler_around_a_handler():
    Trainer().fit()
    signal.signal(TERM, lambda number, frame: print("handled", number))
    faulthandler.register(TERM, all_threads=False, chain=True)
    _kill()


#: differs: faulthandler sets the default handler again
def own_handler_and_faulthandler_that_unregisters():
    Trainer().fit()
    signal.signal(TERM, lambda number, frame: print("handled", number))
    print(faulthandler.unregister(TERM), flush=True)
    _kill()


def event_loop():
    async def main():
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(TERM, done.set)
        _kill()
        await done.wait()
        print(loop.remove_signal_handler(TERM), signal.getsignal(TERM), flush=True)

    Trainer().fit()
    asyncio.run(main())
    Trainer().fit(inside=_kill)


def wakeup_descriptor():
    Trainer().fit()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(TERM, lambda *_: None)
    _kill()
    print(os.read(reader, 9), signal.set_wakeup_fd(-1))


def in_threads():
    Trainer().fit()
    signal.pthread_sigmask(signal.SIG_BLOCK, {TERM})
    _kill()
    print(signal.sigpending(), signal.sigwait({TERM}), flush=True)
    threading.Thread(target=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {TERM}) and time.sleep(9)).start()
    time.sleep(0.2)
    _kill()
    signal.pthread_kill(threading.main_thread().ident, TERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {TERM})


def killed_in_system_calls():
    Trainer().fit()
    timer = threading.Timer(0.2, _kill)
    timer.start()
    os.read(os.pipe()[0], 1)


def children():
    Trainer().fit()
    print(_fork(_kill), _fork(lambda: Trainer().fit(inside=_kill)), _fork(lambda: _fork(_kill) and os._exit(4)))
    kinds = [multiprocessing.get_context(kind) for kind in ("fork", "spawn")]
    for process in [kind.Process(target=time.sleep, args=(60,)) for kind in kinds]:
        process.start()
        process.terminate()
        process.join()
        print(process.exitcode)
    with kinds[0].Pool(2) as pool:
        print(pool.map(len, ["a", "bc"]))


def programs():
    Trainer().fit()
    for more in ({}, {"preexec_fn": lambda: print(signal.getsignal(TERM))}, {"close_fds": False}):
        child = subprocess.Popen(["sleep", "60"], **more)
        child.terminate()
        print(child.wait())
    for more in ({}, {"preexec_fn": _kill}, {"restore_signals": False}):
        try:
            subprocess.run(["grep", "^Sig[CI]", "/proc/self/status"], check=True, **more)
        except (subprocess.SubprocessError, OSError) as error:
            print(type(error))
    print(os.system("kill -TERM $$"), os.posix_spawnp("true", ["true"], {}) > 0)
    Trainer().fit(inside=lambda: os.execlp("sh", "sh", "-c", "kill -TERM $$"))


globals()[sys.argv[1]]()
