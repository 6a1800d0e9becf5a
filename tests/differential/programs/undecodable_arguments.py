#: shell: exec $PYTHON undecodable_arguments.py "$(printf 'caf\351')" "$(printf 'a\nb')"
"""Arguments that are not UTF-8, in this process and in a child."""

import subprocess
import sys

from tinyrl import Trainer

print(ascii(sys.argv), Trainer().fit(), flush=True)
if sys.argv[-1] != "child":
    print(subprocess.run([sys.executable, *sys.argv, "child"]).returncode)
