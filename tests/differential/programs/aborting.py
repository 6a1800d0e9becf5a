#: ignore: ^(Extension modules:.*|Thread 0x.*most recent call first.:|  <no Python frame>|.*/run/watcher.py", line .*)?$
"""os.abort in a stage, with a traceback of faulthandler.

autoprof's watcher is a further thread. It may be starting, without a Python frame, or not exist yet.
"""

import faulthandler
import os
import resource

from tinyrl import Trainer

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
faulthandler.enable()
Trainer().fit(inside=os.abort)
