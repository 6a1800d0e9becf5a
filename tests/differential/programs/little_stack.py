"""Threads with small stacks."""

import threading

from tinyrl import Trainer, evaluate


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
