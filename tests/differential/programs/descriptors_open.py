"""Open files of a process with numbers below 700, before, in and after stages."""

import os

from tinyrl import Trainer


def count():
    open_files = sorted(fd for fd in map(int, os.listdir("/proc/self/fd")) if fd < 700)
    # Leave out the descriptor of the listing itself, which is already closed.
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in open_files if os.path.lexists(f"/proc/self/fd/{fd}")]
    return [link.split(":")[0] for link in links]


print(count())
Trainer().fit(inside=lambda: print(count()))
print(count(), os.open("/dev/null", os.O_RDONLY))
