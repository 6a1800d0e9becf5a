#: functions:
#: captures: yes
#: needs: torch
#: slow:
"""Processes, threads, tasks, signals and limits in captured steps."""

import asyncio
import concurrent.futures
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading

import torch
from tinyrl import Trainer, score

torch._lazy_modules.discard("_inductor")  # or the first capture imports it, which takes longer than all else


def few_files():
    """Limit of open files during captured steps."""
    trainer = Trainer()
    trainer.fit(1, lambda: torch.ones(2))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    opened = []

    def use():
        try:
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as error:
            return error.strerror

    trainer.global_step = 2
    print(trainer.train_step(lambda: None), trainer.update(use))
    for trainer.global_step in range(3, 6):
        print(trainer.train_step(lambda: torch.ones(2).sum().item()))
    for descriptor in opened:
        os.close(descriptor)


def full_disk():
    """File size limit of 20 kB: the program's own writes fail as without autoprof, and nothing else fails."""
    print(Trainer().fit(1, lambda: torch.ones(2).sum().item()))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    def write():
        try:
            torch.save(torch.ones(100_000), "large.pt")
        except Exception as error:
            return type(error).__name__
        return torch.ones(3).sum().item()

    trainer = Trainer()
    for trainer.global_step in range(2, 5):
        print(trainer.train_step(write))


def threads():
    """Stages in 20 concurrent threads in captured steps; one of them is recorded."""
    found = []

    def work():
        return torch.ones(8).sum().item()

    def thread(number):
        trainer = Trainer()
        trainer.global_step = 1
        found.extend(trainer.fit(3, work))

    threads = [threading.Thread(target=thread, args=(number,)) for number in range(20)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    print(len(found), set(found), threading.active_count() <= 2)


def tasks():
    """Coroutine stages in captured steps, among a thousand tasks, with cancellation and time-outs."""
    trainer = Trainer()

    async def work(*_):
        await asyncio.sleep(0)
        return torch.ones(4).sum().item()

    async def slow(*_):
        await asyncio.sleep(60)

    async def main():
        print(await trainer.afit(2, work))
        trainer.global_step = 3
        print(sum(await asyncio.gather(*(trainer.sample(number, work) for number in range(1000)))))
        try:
            await asyncio.wait_for(trainer.atrain_step(slow), 5)
        except TimeoutError as error:
            print(repr(error))
        print(await trainer.atrain_step(work), len(asyncio.all_tasks()))

    asyncio.run(main())


def signals():
    """Repeated checkpoint signals in captured stages, and a timer."""
    saved = []
    signal.signal(signal.SIGUSR1, lambda *_: saved.append(torch.ones(2).sum().item()))
    ticks = []
    signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    print(Trainer().fit(3, lambda: os.kill(os.getpid(), signal.SIGUSR1)), saved)
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(len(ticks) >= 0, signal.getitimer(signal.ITIMER_REAL))


def processes():
    """Subprocesses, process pools and their exceptions in captured stages."""

    def work():
        said = subprocess.run([sys.executable, "-c", "print('a child')"], capture_output=True, text=True)
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            return said, pool.submit(score, ["a"]).result(), torch.ones(2).sum().item()

    print(Trainer().fit(2, work))


#: sometimes: a fork while autoprof starts its helper inherits the helper's pipes, so autoprof waits for the child
def loader():
    """DataLoader whose workers fork in a captured stage."""

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return Trainer().update(lambda: torch.tensor(index))

    def work():
        loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2)
        return [batch.tolist() for batch in loader]

    print(Trainer().fit(inside=work))
    loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2, persistent_workers=True)
    print([batch.tolist() for batch in loader], Trainer().fit(1, lambda: [batch.tolist() for batch in loader]))


globals()[sys.argv[1]]()
