#: captures: yes
#: needs: torch
#: needs: pyfakefs
"""Steps in a fake file system, which replaces `os`, `io` and `fcntl` in all modules."""

import os
import pathlib

import torch
from pyfakefs.fake_filesystem_unittest import Patcher
from tinyrl import Trainer


def save():
    pathlib.Path("/data/saved").write_text("saved")
    with open("/data/in") as file:
        return file.read()


def files():
    return sorted(os.path.join(place, name) for place, _, names in os.walk("/") for name in names)


# Let torch import further modules now, because that fails in a fake file system.
with torch.profiler.profile():
    torch.ones(8)
with Patcher() as patcher:
    patcher.fs.create_file("/data/in", contents="text")
    print(Trainer().fit(2, save), files())
    try:
        Trainer().fit(1, lambda: open("/none"))
    except FileNotFoundError as error:
        print(error)
print(Trainer().fit(2), os.path.exists("/data"))
