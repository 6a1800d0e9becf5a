#: hooks: unseen
"""Limit of open files that is reached before the import."""

import os
import resource

import tinyrl.trainer as warm

opened = [os.open("/dev/null", os.O_RDONLY)]
resource.setrlimit(resource.RLIMIT_NOFILE, (opened[0] + 1, opened[0] + 1))
print(warm.Trainer().fit(3), warm.score(["a"]))
try:
    open("/dev/null")
except OSError as error:
    print(error)
