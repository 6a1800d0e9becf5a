"""The open files of a process, before stages, in them and after; but for the file that a crash would be told in."""

import os

from tinyrl import Trainer


def count():
    open_files = sorted(os.listdir("/proc/self/fd"), key=int)
    # The last one is that of the listing, where a crash file with a high number does not come after it.
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in open_files if os.path.lexists(f"/proc/self/fd/{fd}")]
    return [link.split(":")[0] for link in links if "/crashes/" not in link]


print(count())
Trainer().fit(inside=lambda: print(count()))
print(count(), os.open("/dev/null", os.O_RDONLY))
