#: set: AUTOPROF_LOG=warning
"""sys.exit with all kinds of codes, in stages."""

import subprocess
import sys

if len(sys.argv) > 1:
    from tinyrl import Trainer

    Trainer().fit(inside=lambda: sys.exit(eval(sys.argv[1])))
for code in ("None", "0", "7", "'a text'", "256", "-1", "(1, 2)", "True"):
    done = subprocess.run([sys.executable, __file__, code], capture_output=True, text=True)
    print(code, done.returncode, done.stdout, done.stderr)
