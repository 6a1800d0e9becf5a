#: needs: ray
#: slow:
#: captures: no
"""`import ray` in one thread, and `import ray.actor` in another thread a moment later."""

import contextlib
import threading
import time

from tinyrl import Trainer

Trainer().fit()


def package():
    with contextlib.suppress(ImportError, RuntimeError):  # the other thread has imported only a part of Ray
        import ray


def module():
    time.sleep(0.05)
    with contextlib.suppress(ImportError, RuntimeError):
        import ray.actor


threads = [threading.Thread(target=package, daemon=True), threading.Thread(target=module, daemon=True)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(30)
print([thread.is_alive() for thread in threads])
