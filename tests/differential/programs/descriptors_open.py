"""The open files of a process, before stages, in them and after, with numbers below 700."""

import os

from tinyrl import Trainer


def count():
    open_files = sorted(fd for fd in map(int, os.listdir("/proc/self/fd")) if fd < 700)
    # The descriptor of the listing is closed again.
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in open_files if os.path.lexists(f"/proc/self/fd/{fd}")]
    return [link.split(":")[0] for link in links]


print(count())
Trainer().fit(inside=lambda: print(count()))
print(count(), os.open("/dev/null", os.O_RDONLY))
