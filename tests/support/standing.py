"""Run of several processes that are stuck, each in another way, until their stdin ends: standing.py [KIND RANK]

Its output and exit status must not change if autoprof examines it. With `AUTOPROF=1` it is a run of autoprof.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NoReturn

import autoprof

_LONG_S = 240
# Three ranks that wait for a fourth one; a data loader; two threads in a deadlock; a C call that keeps the GIL;
# coroutines; a forked child; a process that is killed.
KINDS = ("reduce", "reduce", "reduce", "collate", "locks", "c", "samples", "forked", "dies")


def held() -> None:
    os.read(0, 1)


def stdin_ended() -> bool:
    return bool(select.select([0], [], [], 0)[0])


def all_reduce() -> None:
    held()


def collate() -> None:
    held()


def locks() -> None:
    first, second, there = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def one(mine: threading.Lock, other: threading.Lock) -> None:
        with mine:
            there.wait(_LONG_S)
            # A deadlock, which the end of stdin resolves.
            while not other.acquire(timeout=0.2):
                if stdin_ended():
                    return
            other.release()

    other = threading.Thread(target=one, args=(second, first), name="other")
    other.start()
    one(first, second)
    other.join()


async def search(sample: int) -> None:
    while not stdin_ended():
        await asyncio.sleep(0.05)


def samples() -> None:
    async def run_all() -> None:
        await asyncio.gather(*(search(number) for number in range(8)))

    asyncio.run(run_all())


def forked() -> None:
    pid = os.fork()
    if pid == 0:
        with autoprof.stage("of_the_fork", role="critic", rank=70):
            Path("fork.ready").write_text(str(os.getpid()))
            held()
        os._exit(0)
    print("forked", os.waitpid(pid, 0)[1])


def dies() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def c() -> None:
    ctypes.PyDLL(None).sleep(3600)


def run_kind(kind: str, rank: int) -> None:
    with autoprof.step(3), autoprof.stage("update_actor", role="actor", rank=rank):
        ready = Path(f"{kind}{rank}.ready")
        part = ready.with_suffix(".part")
        part.write_text(str(os.getpid()))
        part.rename(ready)
        globals()["all_reduce" if kind == "reduce" else kind]()
    # autoprof opens its crash file with a high number, so that the program's own numbers stay the same.
    descriptors = [number for number in os.listdir("/proc/self/fd") if int(number) < 700]
    print(kind, rank, sorted(thread.name for thread in threading.enumerate()), descriptors)


def main() -> int:
    if sys.argv[1:]:
        run_kind(sys.argv[1], int(sys.argv[2]))
        return 0
    commands = [[sys.executable, __file__, kind, str(rank)] for rank, kind in enumerate(KINDS)]
    until, ends = os.pipe()
    processes = [subprocess.Popen(command, stdin=until, stdout=subprocess.PIPE, text=True) for command in commands]
    with autoprof.step(3):
        Path("parent.ready").write_text("")
        held()
    os.close(ends)
    for kind, process in zip(KINDS, processes, strict=True):
        if kind == "c":
            process.kill()
        output, _ = process.communicate(timeout=_LONG_S)
        print(kind, process.returncode, output, end="")
    print(threading.active_count())
    return 5


if __name__ == "__main__":
    raise SystemExit(main())
