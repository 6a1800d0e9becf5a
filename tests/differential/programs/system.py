#: functions:
"""Processes, threads, signals, limits, files and streams."""

import contextlib
import faulthandler
import io
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback

from tinyrl import Trainer, evaluate, score


def descriptors_open():
    """Open files of a process with numbers below 700, before, in and after stages."""

    def count():
        open_files = sorted(fd for fd in map(int, os.listdir("/proc/self/fd")) if fd < 700)
        # Leave out the descriptor of the listing itself, which is already closed.
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in open_files if os.path.lexists(f"/proc/self/fd/{fd}")]
        return [link.split(":")[0] for link in links]

    print(count())
    Trainer().fit(inside=lambda: print(count()))
    print(count(), os.open("/dev/null", os.O_RDONLY))


#: captures: no
def few_files():
    """Limit of open files, reached in a stage and before a stage."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    opened = []

    def use():
        try:
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as error:
            print(error, len(opened) > 20)

    trainer = Trainer()
    trainer.update(use)
    print(trainer.fit(3))
    for descriptor in opened:
        os.close(descriptor)
    print(trainer.fit(1))


#: captures: no
def few_processes():
    """Limit of processes, so that no thread and no process can start. The limit does not apply to root."""
    Trainer().fit(1)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    try:
        threading.Thread(target=print, args=("runs",)).start()
    except RuntimeError as error:
        print(error)
    try:
        os.fork()
    except OSError as error:
        print(error)
    print(Trainer().fit())


#: captures: no
#: hooks: unseen
def little_disk():
    """File size limit of 0: Python ignores SIGXFSZ, and the user's own writes fail as without autoprof."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    def write():
        with open("file", "w") as file:
            file.write("x")

    trainer = Trainer()
    try:
        trainer.fit(inside=write)
    except OSError as error:
        print(repr(error))
    print(trainer.fit(3))


def little_stack():
    """Threads with small stacks."""

    def down(depth):
        return evaluate(down, depth - 1) if depth else "bottom"

    for size in (32, 64):
        threading.stack_size(size * 1024)
        found = []
        threads = [threading.Thread(target=lambda: found.append((Trainer().fit(), down(5)))) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(len(found), found[0], threading.stack_size())


#: hooks: unseen
def directory_of_root():
    """Process that changes its user before the first step, and then can't write to its directory."""
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    print(Trainer().fit(), os.getuid())


def ignored_children():
    """Ignored SIGCHLD, so that the program can't wait for children."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print(Trainer().fit(), signal.getsignal(signal.SIGCHLD))


def priorities():
    """Properties of the process: niceness, affinity, limits, session, dumpable, title."""

    def look():
        limits = [resource.getrlimit(getattr(resource, name)) for name in sorted(dir(resource)) if "RLIMIT_" in name]
        print(os.nice(0), len(os.sched_getaffinity(0)), limits, os.getpgid(0) == os.getpid(), threading.active_count())
        print(open("/proc/self/cmdline").read().split("\0")[-2], sys.getswitchinterval(), sys.getrecursionlimit())
        print(
            sys.get_int_max_str_digits(), sys.getdlopenflags(), sys.get_asyncgen_hooks(), sys.flags.hash_randomization
        )

    look()
    Trainer().fit(1, look)
    look()


def forking():
    """os.fork outside and inside of stages, with stages in the child, which exits in different ways."""

    def fork(leave):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            print("child", Trainer().fit(1), flush=True)
            leave()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    print(fork(lambda: os._exit(3)))
    print(Trainer().update(fork, lambda: os._exit(4)))
    print(Trainer().fit(1, lambda: fork(lambda: os._exit(5))))
    print(Trainer().update(fork, lambda: sys.exit(6)))
    print(Trainer().update(fork, lambda: 1 / 0))


#: ignore: DeprecationWarning: This process \(pid=\d+\) is multi-threaded
def fork_from_threads():
    """Fork while other threads are in stages."""
    done = threading.Event()

    def loop():
        trainer = Trainer()
        while not done.is_set():
            trainer.train_step()

    threads = [threading.Thread(target=loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    statuses = set()
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            Trainer().fit(1)
            os._exit(7)
        statuses.add(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    done.set()
    for thread in threads:
        thread.join()
    print(statuses)


#: captures: no
def many_threads():
    """200 concurrent threads in stages."""
    together = threading.Barrier(200)
    found = []
    local = threading.local()

    def work(number):
        local.number = number
        together.wait()
        trainer = Trainer(str(number))
        for _ in range(3):
            found.append((evaluate(lambda: local.number), trainer.update(lambda: number), score(["x" * number])[0]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sorted(found) == sorted([(number,) * 3 for number in range(200)] * 3), threading.active_count())
    print([thread.name for thread in threading.enumerate()])


#: sometimes: sys._current_frames() includes autoprof's watcher thread, which the threading module does not list
def frames_of_threads():
    """Frames of all threads, in a stage."""

    def dump():
        print([thread.name for thread in threading.enumerate()])
        print(sys._current_frames().keys() == {threading.get_ident()})

    Trainer().fit(1, dump)


#: differs: in a hooked function, sys._getframe(1) is the wrapper's frame
def frames_of_callers():
    """Hooked function that reads its caller's frame, as verl's auto_await does (recipes use `rewrap` for it)."""

    def look():
        return sys._getframe(2).f_code.co_name

    def caller():
        return Trainer().update(look)

    print(caller())


def dumping_tracebacks():
    """Dumps of a stage's stack by faulthandler and traceback."""

    def dump():
        faulthandler.dump_traceback(all_threads=False)
        traceback.print_stack()
        print([frame.name for frame in traceback.extract_stack() if "autoprof" not in frame.filename])

    Trainer().fit(1, dump)


def signals():
    """Signal handlers around stages: for checkpoints, for the end of a run, with wakeup descriptors."""
    said = []
    signal.signal(signal.SIGUSR1, lambda number, frame: said.append(signal.Signals(number).name))
    trainer = Trainer()
    trainer.fit(inside=lambda: os.kill(os.getpid(), signal.SIGUSR1))
    print(said)

    class Stop(Exception):
        pass

    def stop(number, frame):
        raise Stop(number)

    signal.signal(signal.SIGTERM, stop)
    try:
        trainer.fit(inside=lambda: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(5))
    except Stop as error:
        print(repr(error), error.__context__)
    print([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD, signal.SIGALRM)])
    print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.set_wakeup_fd(-1), signal.getitimer(signal.ITIMER_REAL))
    signal.signal(signal.SIGALRM, lambda *_: said.append("alarm"))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    trainer.update(lambda: time.sleep(0.3))
    print(said[-1])


def signals_blocked():
    """Signals that the program blocks: while it writes a checkpoint, and for a thread that waits for them."""
    said = []
    trainer = Trainer()
    trainer.fit()
    signal.signal(signal.SIGTERM, lambda *_: said.append("handled"))

    for _ in range(3):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        said.append("written")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    print(said)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    trainer.fit()
    waiting = threading.Thread(
        target=lambda: print("waited for", signal.sigwait({signal.SIGTERM, signal.SIGUSR1}).name)
    )
    waiting.start()
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)
    waiting.join()
    print(mask, signal.pthread_sigmask(signal.SIG_SETMASK, mask) == {signal.SIGTERM, signal.SIGUSR1})


def umask():
    """umask, and the modes of files that a program creates."""
    os.umask(0o027)

    def work():
        os.makedirs("folder/inner", exist_ok=True)
        open("folder/file", "w").close()
        return os.umask(0o027)

    print([oct(mask) for mask in Trainer().fit(inside=work)], oct(os.umask(0)))
    os.umask(0o777)
    print(Trainer().fit())
    os.umask(0o022)


def waiting_for_children():
    """os.wait and SIGCHLD, which see only the program's own children."""
    ended = []
    signal.signal(signal.SIGCHLD, lambda *_: ended.append(1))
    Trainer().fit()
    time.sleep(0.5)
    print(ended)
    try:
        print(os.wait())
    except ChildProcessError as error:
        print(error)
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    found, status = os.wait()
    print(found == pid, status, Trainer().fit())
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError as error:
        print(error)


def children():
    """subprocess in stages: output, status, time-outs, pipes, process groups, closed descriptors."""

    def work():
        print(subprocess.run(["echo", "a"], capture_output=True))
        print(
            subprocess.run([sys.executable, "-c", "import sys; print(sys.argv); sys.exit(3)", "b"], capture_output=True)
        )
        print(subprocess.check_output("echo $0 $PPID | wc -w; ls | wc -l", shell=True))
        try:
            subprocess.run(["sleep", "9"], timeout=0.2)
        except subprocess.TimeoutExpired as error:
            print(error.cmd, error.output)
        pipe = subprocess.Popen(["cat"], stdin=-1, stdout=-1, start_new_session=True, close_fds=True)
        print(pipe.communicate(b"through"))
        code = "import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd')))"
        print(subprocess.check_output([sys.executable, "-c", code], close_fds=False))
        try:
            subprocess.run(["no-such-program"])
        except FileNotFoundError as error:
            print(error)
        print(subprocess.run([sys.executable, "-c", "x"], capture_output=True, env={}).stderr)

    Trainer().fit(1, work)


#: captures: no
def huge_environment():
    """Environment of nearly the largest allowed size, and children."""
    Trainer().fit()
    for number in range(10):
        os.environ[f"LARGE{number}"] = "x" * 100_000
    print(Trainer().fit(), flush=True)
    print(subprocess.run([sys.executable, "-c", "import os; print(len(os.environ['LARGE9']))"]).returncode)


def odd_stdout():
    """Output streams of the user: redirected, captured, in another encoding."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        Trainer().fit(inside=lambda: print("captured"))
    print(repr(out.getvalue()), repr(err.getvalue()))
    sys.stdout.reconfigure(encoding="ascii", errors="backslashreplace", line_buffering=True)
    Trainer().fit(1, lambda: print("ä\ud800"))
    print(sys.stdout.encoding, sys.stderr.encoding, sys.stdout.line_buffering)


def broken_stderr():
    """sys.stderr replaced by None, by a stream that raises, or by another object."""

    class Raises(io.TextIOBase):
        def write(self, text):
            raise RuntimeError("don't write")

        def flush(self):
            raise RuntimeError("don't flush")

    print(Trainer().fit())
    for stream in (None, Raises(), 5, io.StringIO()):
        sys.stderr = stream
        print(Trainer().fit(), Trainer().update(lambda: 2))
    print(repr(sys.stderr.getvalue()))
    sys.stderr = sys.__stderr__


def environment_as_it_was():
    """Environment, which is unchanged except for autoprof's own variables, also in children."""
    code = "import os; print(sorted(each for each in os.environ.items() if not each[0].startswith(('AUTOPROF', 'LC_')))"
    os.environ["MY_SETTING"] = "1"
    Trainer().fit()
    print(sorted((k, v) for k, v in os.environ.items() if not k.startswith("AUTOPROF")))
    Trainer().fit(1, lambda: subprocess.run([sys.executable, "-c", code]))
    sys.stdout.flush()
    os.environ.clear()
    os.environ["PYTHONPATH"] = "x"
    print(Trainer().fit(), list(os.environ))
    subprocess.run([sys.executable, "-c", code])


globals()[sys.argv[1]]()
