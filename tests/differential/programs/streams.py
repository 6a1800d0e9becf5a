#: shell: exec $PYTHON {script} 0<&-
#: shell: exec $PYTHON {script} 1>&-
#: shell: exec $PYTHON {script} 2>&-
#: shell: exec $PYTHON {script} 0<&- 1>&-
#: shell: exec $PYTHON {script} 0<&- 2>&-
#: shell: exec $PYTHON {script} 1>&- 2>&-
#: shell: exec $PYTHON {script} 0<&- 1>&- 2>&-
#: shell: exec $PYTHON {script} 1>/dev/full
#: shell: exec $PYTHON {script} 2>/dev/full
#: shell: exec $PYTHON {script} 2>&1
#: shell: exec $PYTHON {script} 2>/dev/null
#: shell: exec $PYTHON {script} 1>file 2>file
#: set: AUTOPROF_LOG=warning
"""Standard streams that are closed, on a full device, or redirected."""

import os
import sys

said = open("said", "w")
from tinyrl import Trainer


def work():
    print("prints")
    print("says", file=sys.stderr)
    opened = os.open("/dev/null", os.O_RDONLY)
    print(opened < 3, sys.stdin is None, sys.stdout is None, sys.stderr is None, file=said)
    os.close(opened)


try:
    Trainer().fit(inside=work)
except Exception as error:
    print(repr(error), file=said)
said.close()
