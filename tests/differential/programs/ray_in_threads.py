#: needs: ray
#: slow:
#: captures: no
#: differs: defect 9: import of a hooked package and of its module in two threads stands still
"""`import ray` in one thread, `import ray.actor` in another a moment later."""

import threading
import time

from tinyrl import Trainer

Trainer().fit()


def package():
    import ray


def module():
    time.sleep(0.05)
    import ray.actor


threads = [threading.Thread(target=package, daemon=True), threading.Thread(target=module, daemon=True)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(30)
print([thread.is_alive() for thread in threads])
