"""Table of programs with a planted hang or death: the cause, and what `autoprof doctor` must say."""

from __future__ import annotations

from tests.support.planted_hangs import Row

# A distributed program in which rank 1 calls `reward` in step 4, while rank 0 waits for it in an all_reduce.
_LATE = """
def reward():
{0}
def body(number):
    reduce()
    if number == 4 and RANK == 1:
        stuck()
        with autoprof.stage("reward", role="actor"):
            reward()
    reduce()
begin({1})
steps(body)
"""
# A program that calls `fetch_score` in step 4.
_ALONE = """
def fetch_score():
{0}
def body(number):
    time.sleep(0.05)
    if number == 4:
        stuck()
        fetch_score()
steps(body)
"""


def _indented(code: str) -> str:
    return "\n".join(f"    {line}" for line in code.strip("\n").splitlines())


def late(name: str, code: str, *words: str, timeout_s: int = 600, **more: object) -> Row:
    """Return a row of two ranks, in which rank 1 runs `code` and does not join an all_reduce."""
    given = {"who": "actor rank 1", "ranks": 2, "wait_s": 4.0} | more
    return Row(name, _LATE.format(_indented(code), timeout_s), words=words, **given)  # type: ignore[arg-type]


def alone(name: str, code: str, *words: str, **more: object) -> Row:
    """Return a row of one process that runs `code` in step 4."""
    given = {"who": "actor rank 0"} | more
    return Row(name, _ALONE.format(_indented(code)), words=words, **given)  # type: ignore[arg-type]


_SERVER = """
import socket
server = socket.create_server(("localhost", 0))
port = server.getsockname()[1]
"""
# A program with a slow step 4 in its first loop, and the begin of its second loop's body in step 4.
_TWO_LOOPS = """
steps(lambda number: time.sleep(2.5 if number == 4 else 0.05))
def body(number):
    if number == 4:
"""
_TERMINATED = ("actor rank 1 was killed by SIGTERM in update_actor of step 4; it was in ",)
RIGHT = [
    late(
        "missing", "time.sleep(600) # HERE", "step 4 has been stuck", "has not joined all_reduce #", "@HERE", quick=True
    ),
    late(
        "oom",
        'raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB") # HERE',
        "OutOfMemoryError",
        "@HERE",
        never=("Connection",),
        launcher=True,
        wait_s=60,
    ),
    late(
        "regex",
        'import re; re.match("(a+)+$", "a" * 60 + "b") # HERE',
        "update_actor",
        "@HERE",
        "did not answer",
        quick=True,
    ),
    late("pydll", "import ctypes; ctypes.PyDLL(None).sleep(600) # HERE", "update_actor", "@HERE", "did not answer"),
    late("sigstop", "os.kill(os.getpid(), signal.SIGSTOP) # HERE", "reward", "is stopped"),
    late("fifo", 'os.mkfifo("pipe")\nopen("pipe").read() # HERE', "reward", "@HERE"),
    late(
        "timeout",
        "time.sleep(600) # HERE",
        "had not joined all_reduce #",
        "@HERE",
        timeout_s=8,
        launcher=True,
        wait_s=60,
        notes=_TERMINATED,
    ),
    late(
        "launcher-term",
        "time.sleep(600) # HERE",
        "had not joined",
        "@HERE",
        launcher=True,
        act="TERM",
        notes=_TERMINATED,
    ),
    late("ranks-term", "time.sleep(600) # HERE", "had not joined", "@HERE", act="TERM", notes=_TERMINATED),
    Row(
        "rank-fails",
        "def body(number):\n    if number == 4:\n        stuck()\n        if RANK == 0:\n            time.sleep(0.5)\n"
        "            raise ValueError('no score') # HERE\n"
        "        dist.distributed_c10d._get_default_store().wait(['never']) # THERE\nbegin()\nsteps(body)",
        "actor rank 0 failed",
        ("no score", "@HERE"),
        notes=("actor rank 1 was killed by SIGTERM in update_actor of step 4; it was in ", "@THERE"),
        ranks=2,
        launcher=True,
        wait_s=60,
    ),
    late(
        "launcher-kill",
        "time.sleep(600) # HERE",
        "has not joined",
        "@HERE",
        launcher=True,
        act="KILL launcher",
        notes=("2 processes are still running", "actor rank 0 (pid "),
    ),
    late(
        "sigkill",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "was killed by SIGKILL",
        "in update_actor",
        launcher=True,
        wait_s=60,
    ),
    late("segfault", "import ctypes; ctypes.string_at(0) # HERE", "SIGSEGV", "@HERE", launcher=True, wait_s=60),
    late("value-error", 'raise ValueError("no score") # HERE', "no score", "@HERE", launcher=True, wait_s=60),
    late("exit", "os._exit(3)", "exited with status 3", "in update_actor", launcher=True, wait_s=60),
    late(
        "http",
        _SERVER + 'import urllib.request\nurllib.request.urlopen(f"http://localhost:{port}") # HERE',
        "@HERE",
        "it waits for an answer from 127.0.0.1:",
    ),
    Row(
        "first-step",
        "def body(number):\n    if RANK == 1:\n        stuck()\n        time.sleep(600) # HERE\n"
        "    reduce()\nbegin()\nsteps(body)",
        "actor rank 1",
        ("step 1 has been stuck", "@HERE"),
        ranks=2,
        wait_s=4,
    ),
    Row(
        "mismatch",
        "def body(number):\n    reduce()\n    if number == 4:\n        stuck()\n        if RANK == 1:\n"
        "            dist.barrier() # HERE\n        else:\n            dist.all_reduce(torch.ones(4)) # THERE\n"
        "begin()\nsteps(body)",
        "actor rank 1",
        ("barrier", "@HERE"),
        notes=("@THERE",),
        ranks=2,
        wait_s=4,
    ),
    Row(
        "recv",
        "def body(number):\n    reduce()\n    if number == 4:\n        stuck()\n        if RANK == 0:\n"
        "            dist.recv(torch.ones(4), src=1) # THERE\n        else:\n            time.sleep(600) # HERE\n"
        "begin()\nsteps(body)",
        "actor rank 1",
        ("@HERE", "recv from rank 1", "@THERE"),
        ranks=2,
        wait_s=4,
    ),
    Row(
        "irecv",
        "def body(number):\n    reduce()\n    if number == 4:\n        stuck()\n        if RANK == 0:\n"
        "            work = dist.irecv(torch.ones(4), src=1)\n            work.wait() # THERE\n        else:\n"
        "            time.sleep(600) # HERE\nbegin()\nsteps(body)",
        "actor rank 1",
        ("@HERE", "recv from rank 1", "@THERE"),
        ranks=2,
        wait_s=4,
    ),
    Row(
        "uneven-data",
        "def body(number):\n    reduce()\n    if number == 4 and RANK == 0:\n        stuck()\n        reduce() # THERE\n"
        "begin()\nsteps(body)\nif RANK == 1:\n    time.sleep(600) # HERE",
        "rank 1",
        ("has not joined", "@HERE"),
        ranks=2,
        wait_s=4,
    ),
    # Runs that are stuck outside of steps.
    Row(
        "between",
        "def body(number):\n    time.sleep(0.05)\nsteps(body)\ndef load_data():\n    stuck()\n    time.sleep(600) # HERE\n"
        "load_data()",
        "train.py",
        ("@HERE",),
        wait_s=4,
        quick=True,
    ),
    Row(
        "process-group",
        "steps(lambda number: None, 1)\nif RANK == 0:\n    stuck()\n    begin() # HERE\nelse:\n    time.sleep(600) # THERE",
        "rank 1",
        ("@THERE",),
        ranks=2,
        wait_s=8,
    ),
    Row(
        "before-hooks",
        "import small\ndef download():\n    stuck()\n    time.sleep(600) # HERE\ndownload()",
        "train.py",
        ("@HERE",),
        notes=("no step has begun: no hook fired",),
        lib=True,
        wait_s=4,
        quick=True,
    ),
    Row(
        "wrong-path",
        "import small\ndef load(path):\n    open(path) # HERE\nload('/no/model')",
        "failed with FileNotFoundError",
        ("@HERE",),
        lib=True,
        wait_s=60,
    ),
    Row(
        "wrong-path-torchrun",
        "import small\ndef load(path):\n    if RANK == 1:\n        open(path) # HERE\n    time.sleep(20)\nload('/no/model')",
        "rank 1",
        ("failed with FileNotFoundError", "@HERE"),
        lib=True,
        ranks=2,
        launcher=True,
        wait_s=60,
    ),
    # One process.
    alone("sleep", "time.sleep(600) # HERE", "step 4 has been stuck", "@HERE", quick=True),
    alone("loop", "while True: pass # HERE", "@HERE"),
    alone("subprocess", 'import subprocess; subprocess.run(["sleep", "600"]) # HERE', "@HERE"),
    alone("socket", _SERVER + "server.accept() # HERE", "@HERE"),
    alone("event", "threading.Event().wait() # HERE", "@HERE"),
    Row(
        "lock-twice",
        "lock = threading.Lock()\ndef inner():\n    with lock: # HERE\n        pass\ndef body(number):\n"
        "    if number == 4:\n        stuck()\n        with lock:\n            inner()\nsteps(body)",
        "actor rank 0",
        ("deadlock", "for lock, which it holds", "@HERE"),
        quick=True,
    ),
    Row(
        "own-lock-twice",
        "class Cache:\n    def __init__(self):\n        self.guard = threading.Lock()\n    def get(self):\n"
        "        with self.guard: # HERE\n            pass\n    def put(self):\n        with self.guard:\n"
        "            self.get()\ndef body(number):\n    if number == 4:\n        stuck()\n        Cache().put()\nsteps(body)",
        "actor rank 0",
        ("likely deadlock", "for guard, which it holds", "@HERE"),
    ),
    Row(
        "rlock-twice",
        "lock = threading.RLock()\ndef inner():\n    with lock:\n        time.sleep(600) # HERE\ndef body(number):\n"
        "    if number == 4:\n        stuck()\n        with lock:\n            inner()\nsteps(body)",
        "actor rank 0",
        ("@HERE",),
        ("deadlock",),
    ),
    alone(
        "producer-dead",
        "import queue\nitems = queue.Queue()\ndef produce():\n    raise KeyError('prompt') # THERE\n"
        "threading.Thread(target=produce).start()\nitems.get() # HERE",
        "@HERE",
        "KeyError",
        "@THERE",
        quick=True,
    ),
    alone(
        "task-dead",
        "import asyncio\nasync def produce(items):\n    raise KeyError('prompt') # THERE\nasync def main():\n"
        "    items = asyncio.Queue()\n    task = asyncio.create_task(produce(items))\n    await items.get() # HERE\n"
        "asyncio.run(main())",
        "@HERE",
        "KeyError",
        "@THERE",
        quick=True,
    ),
    alone(
        "own-pool",
        "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(2)\ngate = threading.Barrier(2)\n"
        "def outer():\n    gate.wait()\n    return pool.submit(int).result() # HERE\n"
        "[each.result() for each in [pool.submit(outer) for _ in range(2)]]",
        "@HERE",
        "all 2 threads of pool",
        quick=True,
    ),
    alone(
        "pool-worker-dead",
        "import multiprocessing\npool = multiprocessing.get_context('fork').Pool(2)\ntime.sleep(0.3)\n"
        "def die(_): os.kill(os.getpid(), signal.SIGKILL)\nglobals()['die'] = die\ndie.__qualname__ = 'die'\n"
        "pool.map(die, [1]) # HERE",
        "@HERE",
        "multiprocessing pool has replaced a worker that died",
        quick=True,
    ),
    alone(
        "blocked-loop",
        "import asyncio\nasync def bad():\n    await asyncio.sleep(0.1)\n    time.sleep(600) # HERE\n"
        "async def main():\n    await asyncio.gather(bad(), asyncio.sleep(1), asyncio.sleep(1))\nasyncio.run(main())",
        "@HERE",
    ),
    alone(
        "gather",
        "import asyncio\nasync def ask():\n    await asyncio.Event().wait() # HERE\n"
        "async def main():\n    await asyncio.gather(ask(), asyncio.sleep(0.1))\nasyncio.run(main())",
        "@HERE",
    ),
    alone(
        "pipe-full",
        'import subprocess\nchild = subprocess.Popen(["yes"], stdout=-1)\nchild.wait() # HERE',
        "@HERE",
        "it waits for process ",
        " (yes)",
    ),
    alone(
        "flock",
        'import fcntl\none, two = open("l", "w"), open("l", "w")\nfcntl.flock(one, 2)\nfcntl.flock(two, 2) # HERE',
        "@HERE",
    ),
    alone("semaphore", "gate = threading.Semaphore(0)\ngate.acquire() # HERE", "@HERE"),
    alone("barrier", "threading.Barrier(2).wait() # HERE", "@HERE"),
    alone(
        "join",
        "thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)\nthread.start()\nthread.join() # HERE",
        "@HERE",
    ),
    alone(
        "thread-works",
        "def score():\n    while True: time.sleep(0.1) # HERE\n"
        "thread = threading.Thread(target=score, daemon=True)\nthread.start()\nthread.join() # THERE",
        "@HERE",
    ),
    alone(
        "future",
        "from concurrent.futures import ThreadPoolExecutor\ndef score():\n    time.sleep(600) # HERE\n"
        "ThreadPoolExecutor(1).submit(score).result() # THERE",
        "@HERE",
    ),
    Row(
        "two-locks",
        "one, two = threading.Lock(), threading.Lock()\ndef work():\n    with two:\n        time.sleep(0.5)\n"
        "        with one: # THERE\n            pass\ndef body(number):\n    if number == 4:\n        stuck()\n"
        "        with one:\n            threading.Thread(target=work, daemon=True).start()\n            time.sleep(0.2)\n"
        "            with two: # HERE\n                pass\nsteps(body)",
        "actor rank 0",
        ("deadlock of two locks", "@HERE"),
    ),
    # Deaths of one process.
    alone(
        "raises",
        "raise ValueError('no score') # HERE",
        "no score",
        "@HERE",
        who="actor rank 0 failed",
        wait_s=60,
        quick=True,
    ),
    alone("exits", "sys.exit(3) # HERE", "status 3", "@HERE", who="", wait_s=60),
    alone("exits-now", "os._exit(3)", "vanished", who="actor rank 0", wait_s=60),
    alone(
        "killed",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "update_actor",
        who="actor rank 0 vanished",
        wait_s=60,
        quick=True,
    ),
    alone("aborts", "os.abort() # HERE", "SIGABRT", "@HERE", wait_s=60),
    alone("recursion", "def again(): again() # HERE\nagain()", "RecursionError", "@HERE", wait_s=60),
    alone(
        "own-oom", "class OutOfMemoryError(Exception): pass\nraise OutOfMemoryError('pid=7') # HERE", "@HERE", wait_s=60
    ),
    alone("term", "time.sleep(600) # HERE", "step 4 was stuck for at least", "@HERE", act="TERM", quick=True),
    alone(
        "term-early",
        "time.sleep(600) # HERE",
        "was killed by SIGTERM in update_actor of step 4; it was in",
        "@HERE",
        act="TERM",
        wait_s=0.5,
        quick=True,
    ),
    # Runs with two loops.
    Row(
        "second-loop",
        f"{_TWO_LOOPS}        stuck()\n        time.sleep(600) # HERE\nsteps(body)",
        "actor rank 0",
        ("step 4 (loop 2) has been stuck", "@HERE"),
        notes=("step 4 was stuck for 2.5",),
        wait_s=5,
    ),
    Row(
        "second-loop-term",
        f"{_TWO_LOOPS}        stuck()\n        time.sleep(600) # HERE\nsteps(body)",
        "actor rank 0",
        ("was killed by SIGTERM in update_actor of step 4 (loop 2); it was in", "@HERE"),
        notes=("step 4 was stuck for 2.5", "actor rank 0 was in train.py"),
        act="TERM",
        wait_s=0.5,
        quick=True,
    ),
    # Runs without a problem.
    Row(
        "child-terminated",
        "import multiprocessing\ndef work():\n    steps(lambda number: time.sleep(60))\ndef body(number):\n"
        "    child = multiprocessing.get_context('fork').Process(target=work)\n    child.start()\n    time.sleep(0.5)\n"
        "    child.terminate()\n    child.join()\nsteps(body, 1)",
        wait_s=60,
    ),
    Row("fine", "steps(lambda number: time.sleep(0.05))", wait_s=60, quick=True),
    Row(
        "slow-step",
        "steps(lambda number: time.sleep(2.5 if number == 4 else 0.05))",
        wait_s=60,
        words=("step 4 was stuck",),
    ),
    Row(
        "caught",
        "def body(number):\n    try:\n        raise ValueError\n    except ValueError: pass\nsteps(body)",
        wait_s=60,
    ),
    Row(
        "thread-raised",
        "def body(number):\n    if number == 2:\n        thread = threading.Thread(target=lambda: 1 / 0)\n"
        "        thread.start()\n        thread.join()\nsteps(body)",
        wait_s=60,
    ),
]
_RAY = """
import ray
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
{0}
def fetch_score():
    return {1}
def body(number):
    if number == 2:
        stuck()
        fetch_score()
steps(body)
"""


def ray(name: str, code: str, call: str, *words: str, **more: object) -> Row:
    """Return a row whose program evaluates `call` with Ray in step 2, after `code`."""
    given = {"who": "actor rank 0", "wait_s": 10.0} | more
    return Row(f"ray-{name}", _RAY.format(code, call), words=words, **given)  # type: ignore[arg-type]


_ACTOR = """
@ray.remote{0}
class Scorer:
    def score(self):
        {1}
scorer = Scorer.remote()
"""
RAY = [
    ray(
        "unschedulable",
        _ACTOR.format("(num_gpus=1)", "pass"),
        "ray.get(scorer.score.remote()) # HERE",
        "@HERE",
        notes=("can't place actor Scorer: it needs 1 GPU",),
    ),
    ray(
        "resource",
        "@ray.remote(resources={'reward_node': 1})\ndef score(): pass",
        "ray.get(score.remote()) # HERE",
        "@HERE",
        notes=("it needs 1 reward_node",),
    ),
    ray(
        "stuck-actor",
        _ACTOR.format("", "time.sleep(600) # HERE"),
        "ray.get(scorer.score.remote()) # THERE",
        "@HERE",
        who="ray::Scorer",
    ),
    ray(
        "restarts",
        _ACTOR.format("(max_restarts=-1, max_task_retries=-1)", "os._exit(3)"),
        "ray.get(scorer.score.remote()) # HERE",
        "@HERE",
        notes=("Ray has restarted actor Scorer",),
        wait_s=20.0,
    ),
    ray(
        "wait",
        _ACTOR.format("", "time.sleep(600) # HERE"),
        "ray.wait([scorer.score.remote()]) # THERE",
        "@HERE",
        who="ray::Scorer",
    ),
    ray(
        "killed",
        _ACTOR.format("", "os.kill(os.getpid(), signal.SIGKILL)"),
        "ray.get(scorer.score.remote()) # HERE",
        "vanished",
        who="Ray actor Scorer (pid ",
        notes=("actor rank 0 failed with ActorDiedError", "@HERE"),
        wait_s=60.0,
    ),
    ray(
        "raises",
        _ACTOR.format("", "raise ValueError('no score') # HERE"),
        "ray.get(scorer.score.remote()) # THERE",
        "no score",
        "@HERE",
        wait_s=60.0,
    ),
]
# A data loader whose worker 1 runs `code`.
LOADER = """
from torch.utils.data import DataLoader, Dataset
class Prompts(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 3:
            {0}
        return torch.ones(2)
def load():
    for batch in DataLoader(Prompts(), batch_size=2, num_workers=2, multiprocessing_context="fork"): # THERE
        pass
"""


def loader(name: str, code: str, *words: str, **more: object) -> Row:
    """Return a row of one process, whose data loader's worker 1 runs `code` in step 4."""
    code = f"import torch{LOADER.format(code)}def body(number):\n    if number == 4:\n        stuck()\n        load()\nsteps(body)"
    given = {"who": "actor rank 0", "wait_s": 5.0} | more
    return Row(name, code, words=words, **given)  # type: ignore[arg-type]


RAY.append(
    ray(
        "task-dead",
        "from ray.util.queue import Queue\nitems = Queue(actor_options={'num_cpus': 0})\n@ray.remote(num_cpus=0)\n"
        "def produce(): raise KeyError('prompt') # THERE\ntask = produce.remote()",
        "items.get() # HERE",
        "@HERE",
        "Ray task produce ended with KeyError",
        "@THERE",
        wait_s=20.0,
    )
)
# Scenarios that were thought of without a look at the code.
BLIND = [
    alone(
        "sqlite",
        "import sqlite3\none = sqlite3.connect('d'); one.execute('begin exclusive')\nsqlite3.connect('d', timeout=600).execute('begin exclusive') # HERE",
        "@HERE",
    ),
    alone("pause", "signal.pause() # HERE", "@HERE"),
    alone("child-reads", "import subprocess\nsubprocess.Popen(['cat'], stdin=-1).wait() # HERE", "@HERE", " (cat)"),
    alone(
        "async-lock",
        "import asyncio\nasync def main():\n    lock = asyncio.Lock()\n    async with lock:\n        await lock.acquire() # HERE\nasyncio.run(main())",
        "@HERE",
    ),
    alone(
        "one-of-four",
        "from concurrent.futures import ThreadPoolExecutor\ndef score(index):\n    if index == 3: time.sleep(600) # HERE\nwith ThreadPoolExecutor(4) as pool:\n    list(pool.map(score, range(4)))",
        "@HERE",
    ),
    alone(
        "producer-process-dead",
        "import multiprocessing\ncontext = multiprocessing.get_context('fork')\nitems = context.Queue()\ncontext.Process(target=os._exit, args=(3,)).start()\nitems.get() # HERE",
        "@HERE",
        "its process ForkProcess-1 (pid ",
        "exited with status 3",
    ),
    alone(
        "child-join",
        "import multiprocessing\nchild = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,))\nchild.start()\nchild.join() # HERE",
        "@HERE",
        "its process ForkProcess-1 (pid ",
    ),
    alone(
        "process-works",
        "import multiprocessing\ndef score():\n    time.sleep(600) # HERE\n"
        "child = multiprocessing.get_context('fork').Process(target=score, name='Scorer')\nchild.start()\nchild.join()",
        "its process Scorer (pid ",
        "@HERE",
        quick=True,
    ),
    alone(
        "process-pool",
        "import multiprocessing\nfrom concurrent.futures import ProcessPoolExecutor\ndef score(number):\n"
        "    time.sleep(600 * number) # HERE\nglobals()['score'] = score\nscore.__qualname__ = 'score'\n"
        "pool = ProcessPoolExecutor(2, multiprocessing.get_context('fork'))\nlist(pool.map(score, range(2)))",
        "its process ForkProcess-",
        "@HERE",
    ),
    loader("loader", "time.sleep(600) # HERE", "its data loader worker 1 (pid ", "@HERE"),
    loader(
        "loader-stopped",
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "its data loader worker 1 (pid ",
        "is stopped",
    ),
    loader(
        "loader-killed",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "was killed by SIGKILL",
        who="data loader worker (pid ",
        notes=("then: actor rank 0 failed with RuntimeError: DataLoader worker (pid", "@THERE"),
        wait_s=60,
    ),
    loader("loader-raises", "raise KeyError('prompt') # HERE", "KeyError", "@THERE", wait_s=60),
    Row(
        "loader-of-rank",
        LOADER.format("time.sleep(600) # HERE")
        + "def body(number):\n    reduce()\n    if number == 4 and RANK == 1:\n        stuck()\n        load()\n"
        "    reduce()\nbegin()\nsteps(body)",
        "actor rank 1",
        ("has not joined", "@THERE", "its data loader worker 1 (pid ", "@HERE"),
        ranks=2,
        wait_s=5,
    ),
    alone("c-sum", "sum(range(10**12)) # HERE", "did not answer", "@HERE"),
    alone("full-queue", "import queue\nitems = queue.Queue(1)\nitems.put(1)\nitems.put(2) # HERE", "@HERE"),
    Row(
        "at-exit",
        "import atexit\ndef upload():\n    stuck()\n    time.sleep(600) # HERE\natexit.register(upload)\nsteps(lambda number: None)",
        "train.py",
        ("@HERE",),
        wait_s=5,
    ),
    Row(
        "last-thread",
        "def upload():\n    stuck()\n    time.sleep(600) # HERE\nsteps(lambda number: None)\nthreading.Thread(target=upload).start()",
        "train.py",
        ("@HERE",),
        wait_s=5,
    ),
    Row(
        "skipped",
        "def body(number):\n    reduce()\n    if number == 3 and RANK == 1:\n        stuck()\n        return\n    reduce() # THERE\nbegin()\nsteps(body, 3)\nif RANK == 1:\n    time.sleep(600) # HERE",
        "rank 1",
        ("has not joined", "@HERE"),
        ranks=2,
        wait_s=4,
    ),
    Row(
        "leaves-early",
        "def body(number):\n    reduce()\n    if number == 3 and RANK == 1:\n        sys.exit(0) # HERE\n    reduce()\nbegin()\nsteps(body)",
        "actor rank 1",
        ("exited with status 0", "@HERE"),
        ranks=2,
        launcher=True,
        wait_s=60,
    ),
    Row(
        "three-ranks",
        "def body(number):\n    reduce()\n    if number == 3 and RANK == 2:\n        stuck()\n        time.sleep(600) # HERE\n    reduce()\nbegin()\nsteps(body)",
        "actor rank 2",
        ("has not joined", "@HERE"),
        ranks=3,
        wait_s=5,
    ),
    Row(
        "second-run-of-stage",
        "def body(number):\n    reduce()\n    if number == 2 and RANK == 0:\n        stuck()\n        open('/dev/random').read() # HERE\n    reduce()\nbegin()\nsteps(body)",
        "actor rank 0",
        ("@HERE",),
        ranks=2,
        wait_s=5,
    ),
]
# Further scenarios of this kind.
BLIND += [
    Row(
        "ends-first",
        "begin()\nsteps(lambda number: reduce(), 3 if RANK == 0 else 5)\ndist.destroy_process_group()",
        "actor rank 0",
        ("ended before the other ranks, without an error, after update_actor of step 3",),
        ranks=2,
        launcher=True,
        wait_s=60,
    ),
    Row(
        "saves-alone",
        "def body(number):\n    reduce()\n    if number == 3:\n        stuck()\n        if RANK == 1:\n"
        "            dist.all_reduce(torch.ones(4)) # THERE\n        with autoprof.stage('save', role='actor'):\n"
        "            dist.broadcast(torch.ones(1), 0) # HERE\nbegin()\nsteps(body)",
        "rank 0",
        ("broadcast", "@HERE", "@THERE"),
        ranks=2,
        wait_s=5,
    ),
    Row(
        "logging-lock",
        "import logging\nguard = threading.Lock()\nclass Handler(logging.Handler):\n    def emit(self, record):\n"
        "        time.sleep(0.2)\n        with guard: # HERE\n            pass\nlogging.root.addHandler(Handler())\n"
        "def report():\n    with guard:\n        time.sleep(0.1)\n        logging.warning('memory') # THERE\n"
        "def body(number):\n    if number == 4:\n        stuck()\n"
        "        threading.Thread(target=report, daemon=True).start()\n        logging.warning('step')\nsteps(body)",
        "actor rank 0",
        ("likely deadlock of two locks", "guard", "@HERE", "a logging handler's lock", "@THERE"),
        quick=True,
    ),
    alone(
        "thread-exits",
        "import queue\nitems = queue.Queue()\ndef produce():\n    sys.exit('no such shard') # THERE\n"
        "threading.Thread(target=produce).start()\nitems.get() # HERE",
        "@HERE",
        "SystemExit: no such shard",
        "@THERE",
    ),
    alone(
        "executor-waits",
        _SERVER + "import asyncio\ndef search():\n    socket.create_connection(('localhost', port)).recv(9) # HERE\n"
        "async def ask():\n    await asyncio.get_running_loop().run_in_executor(None, search) # THERE\n"
        "async def main():\n    await asyncio.gather(ask(), ask())\nasyncio.run(main())",
        "@HERE",
        "@THERE",
    ),
    alone(
        "prefetch-closes",
        "import queue\ndef prefetch():\n    items = queue.Queue(1)\n    def fill():\n        for item in range(9):\n"
        "            items.put(item) # HERE\n    thread = threading.Thread(target=fill, daemon=True)\n"
        "    thread.start()\n    try:\n        while True: yield items.get()\n    finally:\n"
        "        thread.join() # THERE\nbatches = prefetch()\nnext(batches)\nbatches.close()",
        "@HERE",
        "@THERE",
    ),
    Row(
        "slow-before",
        "def body(number):\n    time.sleep(2.5 if number == 2 else 0.05)\n    if number == 4:\n        stuck()\n"
        "        time.sleep(600) # HERE\nsteps(body)",
        "actor rank 0",
        ("step 4 has been stuck", "@HERE"),
        notes=("step 2 was stuck for",),
    ),
    alone(
        "engine-stopped",
        "import subprocess\ncode = 'import autoprof, time\\nwith autoprof.stage(\"warm\"): pass\\nprint(1, flush=True)\\ntime.sleep(600)'\n"
        "engine = subprocess.Popen([sys.executable, '-c', code], stdout=-1)\nengine.stdout.readline()\n"
        "os.kill(engine.pid, signal.SIGSTOP)\nengine.stdout.readline()",
        "python -c",
        "is stopped, by a signal",
        who="",
    ),
    Row(
        "before-first-step",
        "autoprof.start()\ndef download():\n    stuck()\n    time.sleep(600) # HERE\ndownload()",
        "train.py",
        ("no step has begun", "@HERE"),
        wait_s=4,
    ),
]
# Rows that fail today, with the reason.
FAILS: dict[str, str] = {}
ROWS = [row._replace(fails=FAILS.get(row.name, "")) for row in (*RIGHT, *RAY, *BLIND)]
