#: captures: yes
#: slow:
#: needs: torch
#: python: {script} fork
#: python: {script} spawn
"""torch.multiprocessing by fork and by spawn: tensors in shared memory are passed to children in captured steps."""

import sys

import torch
import torch.multiprocessing as multiprocessing
from tinyrl import Trainer


def child(tensor, queue):
    tensor += 1
    queue.put(Trainer().fit(1, lambda: tensor.sum().item()))


def work():
    context = multiprocessing.get_context(sys.argv[1])
    tensor, queue = torch.zeros(4).share_memory_(), context.Queue()
    process = context.Process(target=child, args=(tensor, queue))
    process.start()
    found = queue.get(timeout=80)
    process.join()
    return found, process.exitcode, tensor.tolist()


if __name__ == "__main__":
    Trainer().fit(1, lambda: torch.ones(2).sum())
    print(Trainer().fit(1, work))
