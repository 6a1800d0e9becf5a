#: hooks: unseen
"""Process that changes its user before the first step, and then can't write to its directory."""

import os

from tinyrl import Trainer

os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
print(Trainer().fit(), os.getuid())
