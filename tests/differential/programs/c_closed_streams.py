#: captures: yes
#: slow:
#: needs: torch
#: unset: PYTHONUNBUFFERED
#: python: {script} 1
#: python: {script} 012
"""Descriptors 0, 1 and 2 closed between captured steps, with text in the buffer of standard output."""

import os
import sys
import threading

import torch
from tinyrl import Trainer

done = threading.Event()


def write():
    """Write to a closed descriptor while autoprof writes traces."""
    while not done.wait(0.001):
        try:
            os.write(1, b"not for a file of autoprof's")
        except OSError:
            pass


trainer = Trainer()
trainer.fit(1, lambda: torch.ones(2).sum().item())
print("left in the buffer")
for number in sys.argv[1]:
    os.close(int(number))
writer = threading.Thread(target=write)
writer.start()
for trainer.global_step in range(2, 6):
    trainer.train_step(lambda: torch.ones(2).sum().item())
done.set()
writer.join()
with open("said", "w") as said:
    print(trainer.global_step, file=said)
