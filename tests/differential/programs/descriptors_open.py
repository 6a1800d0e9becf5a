"""The open files of a process, before stages, in them and after."""

import os

from tinyrl import Trainer


def count():
    return [
        os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in sorted(os.listdir("/proc/self/fd"), key=int)[:-1]
    ]


print(count())
Trainer().fit(inside=lambda: print(count()))
print(count(), os.open("/dev/null", os.O_RDONLY))
