#: hooks: unseen
"""The process is another user from the first step on: what it could write, it can't any more."""

import os

from tinyrl import Trainer

os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
print(Trainer().fit(), os.getuid())
