#: ignore: DeprecationWarning: This process \(pid=\d+\) is multi-threaded
"""Fork while other threads are in stages."""

import os
import threading

from tinyrl import Trainer

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
