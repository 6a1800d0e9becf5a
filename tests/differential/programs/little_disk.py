#: captures: no
#: hooks: unseen
"""No file may grow (RLIMIT_FSIZE): SIGXFSZ is ignored by Python, and the user's own writing fails as it does."""

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
