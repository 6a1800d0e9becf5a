#: captures: yes
#: slow:
#: needs: torch
"""torch.multiprocessing by fork: tensors in shared memory are passed to children in captured steps."""

import torch
import torch.multiprocessing as multiprocessing
from tinyrl import Trainer


def child(tensor, queue):
    tensor += 1
    queue.put(Trainer().fit(1, lambda: tensor.sum().item()))


def work():
    context = multiprocessing.get_context("fork")
    tensor, queue = torch.zeros(4).share_memory_(), context.Queue()
    process = context.Process(target=child, args=(tensor, queue))
    process.start()
    found = queue.get(timeout=80)
    process.join()
    return found, process.exitcode, tensor.tolist()


if __name__ == "__main__":
    Trainer().fit(1, lambda: torch.ones(2).sum())
    print(Trainer().fit(1, work))
