#: hooks: unseen
"""Working directory that is deleted before the import, and in a stage."""

import os
import shutil
import sys

here = os.getcwd()
os.mkdir("below")
os.chdir("below")
os.rmdir("../below")
from tinyrl import Trainer

print(Trainer().fit())
try:
    os.getcwd()
except FileNotFoundError as error:
    print(error)
os.chdir(here)
os.mkdir("other")
os.chdir("other")
print(Trainer().fit(1, lambda: shutil.rmtree("../other")) if False else Trainer().fit())
os.chdir(here)
