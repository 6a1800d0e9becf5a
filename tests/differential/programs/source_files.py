#: differs: inspect.getsourcefile and getfile do not follow __wrapped__: they name a file of autoprof's
"""The file in which a function is defined, as inspect says it."""

import inspect
import os

from tinyrl import Trainer, score

for function in (score, Trainer.update, Trainer.build):
    print(os.path.basename(inspect.getfile(function)), os.path.basename(inspect.getsourcefile(function)))
    print(os.path.basename(inspect.getabsfile(function)))
print(score(["a"]))
