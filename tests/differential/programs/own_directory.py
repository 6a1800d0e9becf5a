#: hooks: unseen
#: unset: AUTOPROF_DIR
"""Run in the default folder, the working directory, which was deleted."""

import os

here = os.getcwd()
os.mkdir("deleted")
os.chdir("deleted")
os.rmdir("../deleted")
from tinyrl import Trainer

print(Trainer().fit())
os.chdir(here)
