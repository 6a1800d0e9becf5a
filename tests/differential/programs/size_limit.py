#: captures: no
#: python: {script} 0 default
#: python: {script} 2000 default
#: python: {script} 2000 handled
"""File size limit; its signal ends the process, or has a handler."""

import resource
import signal
import sys

from tinyrl import Trainer

trainer = Trainer()
trainer.update()
came = []
signal.signal(signal.SIGXFSZ, signal.SIG_DFL if sys.argv[2] == "default" else lambda *_: came.append(1))
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
print(len(trainer.fit(40)), came, signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.sigpending())
