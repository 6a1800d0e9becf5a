#: captures: yes
#: slow:
#: needs: torch
"""Mocks of the environment and of `uuid`, around captured steps and in them."""

import os
from unittest import mock

import torch
from tinyrl import Trainer

PATCHES = {
    "getenv": lambda: mock.patch("os.getenv", side_effect=["8"]),
    "uuid4": lambda: mock.patch("uuid.uuid4", side_effect=["id"]),
    "environ": lambda: mock.patch("os.environ", {"RANK": "x", "WORLD_SIZE": ""}),
    "cleared": lambda: mock.patch.dict(os.environ, clear=True),
    "changed": lambda: mock.patch.dict(os.environ, {"RANK": "x", "LD_PRELOAD": "nsys", "MY_SETTING": "1"}),
}


def work():
    return torch.ones(2).sum().item(), os.environ.get("MY_SETTING")


# Let torch import the modules that it needs later.
with torch.profiler.profile():
    work()
for name, patch in PATCHES.items():
    before = dict(os.environ)
    with patch() as mocked:
        print(name, Trainer().fit(2, work), getattr(mocked, "call_args_list", None))
    print(len(Trainer().fit(1, lambda: patch().start())))  # noqa: B023
    mock.patch.stopall()
    print(Trainer().fit(1, work), dict(os.environ) == before)
