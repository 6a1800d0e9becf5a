#: differs: inspect.getsourcefile and getfile do not follow __wrapped__, so they return a file of autoprof
"""File in which a function is defined, according to inspect."""

import inspect
import os

from tinyrl import Trainer, score

for function in (score, Trainer.update, Trainer.build):
    print(os.path.basename(inspect.getfile(function)), os.path.basename(inspect.getsourcefile(function)))
    print(os.path.basename(inspect.getabsfile(function)))
print(score(["a"]))
