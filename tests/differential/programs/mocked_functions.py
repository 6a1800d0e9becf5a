#: python: {script} hooked
#: captures: no
#: python: {script} captured
#: captures: yes
#: needs: torch
"""Functions of the standard library replaced by unittest.mock around steps, and the calls that each mock gets."""

import atexit
import builtins
import contextlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from unittest import mock

from tinyrl import Trainer, evaluate
from tinyrl.blocks import timer

MODULES = (os, os.path, time, io, json, shutil, subprocess, tempfile, atexit, threading)
# Answers of each mock, one for each call; after the last answer, a call raises StopIteration.
ANSWERS = {"time.time": [1.0, 2.0], "time.sleep": [None], "time.monotonic": [5.0, 5.0]}


def functions():
    for module in MODULES:
        for name, value in vars(module).items():
            # pathlib calls these functions for each path.
            if name in ("fspath", "join", "splitroot"):
                continue
            if not name.startswith("_") and callable(value) and not isinstance(value, type):
                yield f"{module.__name__}.{name}"
    yield from ("builtins.open", "subprocess.Popen", "threading.Thread", "threading.Event", "threading.Condition")
    yield from (f"pathlib.Path.{name}" for name in ("exists", "is_dir", "stat", "mkdir", "read_text", "unlink", "open"))


def work():
    if patched["time.sleep"] is not time.sleep:
        return None
    return [time.time(), time.sleep(1), time.monotonic(), time.time(), time.monotonic()]


def train():
    trainer = Trainer()
    trainer.fit(3)
    trainer.update(work)
    evaluate()
    Trainer.build()
    Trainer.reward("text")
    with timer("block"):
        pass


if "captured" in sys.argv:
    import torch

    # Let torch import the modules that it needs later.
    with torch.profiler.profile() as profile:
        torch.ones(8)
    profile.export_chrome_trace(os.devnull)
patched = {}
with contextlib.ExitStack() as stack:
    # autoprof's threads run during the mocks too.
    for name in functions():
        patched[name] = stack.enter_context(mock.patch(name, side_effect=ANSWERS.get(name)))
    patched_open = builtins.open
    train()
print({name: mocked.call_args_list for name, mocked in patched.items() if mocked.called})
print(isinstance(patched_open, mock.Mock), pathlib.Path("here").exists())
train()
