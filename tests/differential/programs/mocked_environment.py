"""Mocks of the environment and of its functions, around steps and in them."""

import os
from unittest import mock

from tinyrl import Trainer, evaluate
from tinyrl.blocks import timer

# A patched `get` of the instance, an answer for each call, and another mapping instead of the environment.
PATCHES = {
    "get": lambda: mock.patch("os.environ.get", side_effect=["7"]),
    "getenv": lambda: mock.patch("os.getenv", side_effect=["8"]),
    "environ": lambda: mock.patch("os.environ", {"RANK": "x", "WORLD_SIZE": ""}),
    "cleared": lambda: mock.patch.dict(os.environ, clear=True),
    "changed": lambda: mock.patch.dict(os.environ, {"RANK": "x", "AUTOPROF": "0", "MY_SETTING": "1"}),
}


def train(inside):
    trainer = Trainer()
    with timer("block"):
        return trainer.fit(2), trainer.update(inside), evaluate(inside), Trainer.reward("text")


def seen():
    return sorted(name for name in os.environ if not name.startswith(("AUTOPROF", "LC_", "TORCH")))


def read():
    return os.environ.get("MY_SETTING"), os.getenv("MY_SETTING")


def patched_inside(patch):
    def inside():
        with patch() as mocked:
            return getattr(mocked, "call_args_list", seen())

    return inside


for when in ("before the first step", "after it"):
    for name, patch in PATCHES.items():
        before = dict(os.environ)
        with patch() as mocked:
            print(when, name, train(seen if name in ("environ", "cleared", "changed") else lambda: None))
            print(getattr(mocked, "call_args_list", None))
        print(train(patched_inside(patch)), dict(os.environ) == before, read())
