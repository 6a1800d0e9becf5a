#: captures: no
"""Environment of nearly the largest allowed size, and children."""

import os
import subprocess
import sys

from tinyrl import Trainer

Trainer().fit()
for number in range(10):
    os.environ[f"LARGE{number}"] = "x" * 100_000
print(Trainer().fit(), flush=True)
print(subprocess.run([sys.executable, "-c", "import os; print(len(os.environ['LARGE9']))"]).returncode)
