#: hooks: unseen
#: unset: AUTOPROF_DIR
"""Runs lie in the working directory where nothing is said of them, which can't be written or is deleted."""

import os

here = os.getcwd()
os.mkdir("deleted")
os.chdir("deleted")
os.rmdir("../deleted")
from tinyrl import Trainer

print(Trainer().fit())
os.chdir(here)
