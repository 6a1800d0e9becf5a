#: captures: no
"""Limit of open files, reached in a stage and before a stage."""

import os
import resource

from tinyrl import Trainer

resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
opened = []


def use():
    try:
        while True:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        print(error, len(opened) > 20)


trainer = Trainer()
trainer.update(use)
print(trainer.fit(3))
for descriptor in opened:
    os.close(descriptor)
print(trainer.fit(1))
