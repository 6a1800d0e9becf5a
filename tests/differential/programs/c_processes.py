#: captures: yes
#: slow:
#: needs: torch
"""Subprocesses, process pools and their exceptions in captured stages."""

import concurrent.futures
import multiprocessing
import subprocess
import sys

import torch
from tinyrl import Trainer, score


def work():
    said = subprocess.run([sys.executable, "-c", "print('a child')"], capture_output=True, text=True)
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return said, pool.submit(score, ["a"]).result(), torch.ones(2).sum().item()


print(Trainer().fit(2, work))
