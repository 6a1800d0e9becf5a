#: unset: HOME
#: unset: PATH
#: unset: TMPDIR
#: unset: USER
#: unset: LANG
"""Nearly empty environment."""

import os

from tinyrl import Trainer

print(Trainer().fit(), "HOME" in os.environ, os.path.expanduser("~") != "~")
