#: captures: no
#: hooks: unseen
"""File size limit of 0: Python ignores SIGXFSZ, and the user's own writes fail as without autoprof."""

import resource

from tinyrl import Trainer

resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def write():
    with open("file", "w") as file:
        file.write("x")


trainer = Trainer()
try:
    trainer.fit(inside=write)
except OSError as error:
    print(repr(error))
print(trainer.fit(3))
