#: captures: no
"""Command line of 11,000 arguments, and children of the program."""

import os
import subprocess
import sys

if len(sys.argv) == 1:
    os.execv(sys.executable, [sys.executable, __file__, *(f"--argument={number:08}" for number in range(11_000))])
from tinyrl import Trainer

Trainer().fit()
print(len(sys.argv), flush=True)
subprocess.run(["echo", "a child"])
Trainer().fit(1, lambda: subprocess.run([sys.executable, "-c", "print('a child of a stage')"]))
