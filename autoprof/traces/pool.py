"""Pool of processes that report their progress."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

T = TypeVar("T")

_LOOK_SECONDS = 0.2
# What a worker has done, for the process that waits for it; set in workers only.
_done: Any = None


def run(
    work: Callable[..., T], tasks: Sequence[tuple[Any, ...]], jobs: int, progress: Callable[[int], object]
) -> Iterator[T]:
    """Yield the results of `work(*task, progress)` in the order of the tasks.

    Args:
        work: A function of a module.
        tasks: Its arguments, but for the last.
        jobs: How many processes; with one it is this one.
        progress: Is told here what each is told there.

    Raises:
        OSError: A process was killed.
    """
    if min(jobs, len(tasks)) <= 1:
        for task in tasks:
            yield work(*task, progress)
        return
    # A process that starts afresh has nothing of this one's memory and threads.
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    with ProcessPoolExecutor(min(jobs, len(tasks)), context, _remember, (done,)) as pool:
        futures = [pool.submit(_do, work, task) for task in tasks]
        told = 0
        try:
            for future in futures:
                while not future.done():
                    wait([future], _LOOK_SECONDS)
                    now = done.value
                    progress(now - told)
                    told = now
                yield future.result()
        except BrokenProcessPool:
            raise OSError("a process that merged was killed; is there too little memory?") from None


def _remember(done: Any) -> None:
    global _done
    _done = done


def _do(work: Callable[..., T], task: tuple[Any, ...]) -> T:
    return work(*task, _add)


def _add(amount: int) -> None:
    with _done.get_lock():
        _done.value += amount
