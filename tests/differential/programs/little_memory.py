#: captures: no
"""MemoryError of the user in a stage, under a memory limit."""

import resource

from tinyrl import Trainer

trainer = Trainer()
trainer.fit()
resource.setrlimit(resource.RLIMIT_AS, (2_000_000_000, 2_000_000_000))
try:
    trainer.update(lambda: bytearray(3_000_000_000))
except MemoryError as error:
    print(repr(error), error.__context__)
print(trainer.fit())
