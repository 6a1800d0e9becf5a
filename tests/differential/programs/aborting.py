#: ignore: ^(Extension modules:.*|Thread 0x.*most recent call first.:)?$
"""os.abort in a stage, with a traceback of faulthandler."""

import faulthandler
import os
import resource

from tinyrl import Trainer

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
faulthandler.enable()
Trainer().fit(inside=os.abort)
