"""Environment, which is unchanged except for autoprof's own variables, also in children."""

import os
import subprocess
import sys

from tinyrl import Trainer

code = "import os; print(sorted(each for each in os.environ.items() if not each[0].startswith(('AUTOPROF', 'LC_')))"
os.environ["MY_SETTING"] = "1"
Trainer().fit()
print(sorted((k, v) for k, v in os.environ.items() if not k.startswith("AUTOPROF")))
Trainer().fit(1, lambda: subprocess.run([sys.executable, "-c", code]))
sys.stdout.flush()
os.environ.clear()
os.environ["PYTHONPATH"] = "x"
print(Trainer().fit(), list(os.environ))
subprocess.run([sys.executable, "-c", code])
