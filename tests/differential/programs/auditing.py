"""Audit hook of the user that forbids sockets and counts files opened for writing in the working directory."""

import os
import sys

from tinyrl import Trainer

seen = []
here = os.getcwd()


def hook(event, arguments):
    if event.startswith("socket."):
        raise RuntimeError(event)
    if event == "open" and str(arguments[0]).startswith(here):
        seen.append(arguments[0])


Trainer().fit()
sys.addaudithook(hook)
print(Trainer().fit(), seen)
