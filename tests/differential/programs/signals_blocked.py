"""Signals that the program blocks: while it writes a checkpoint, and for a thread that waits for them."""

import os
import signal
import threading
import time

from tinyrl import Trainer

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
waiting = threading.Thread(target=lambda: print("waited for", signal.sigwait({signal.SIGTERM, signal.SIGUSR1}).name))
waiting.start()
time.sleep(0.2)
os.kill(os.getpid(), signal.SIGTERM)
waiting.join()
print(mask, signal.pthread_sigmask(signal.SIG_SETMASK, mask) == {signal.SIGTERM, signal.SIGUSR1})
