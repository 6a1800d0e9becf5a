#: captures: no
"""Concurrent imports of hooked packages and their modules in many threads, in every order.

In CPython, an import fails if one thread holds the lock of a package and another thread the lock of its module
(https://github.com/python/cpython/issues/83065; seen in 5 of 180 runs without autoprof). The package is then missing
for threads that import its modules. The program repeats such imports; no other import may fail.
"""

import importlib
import random
import sys
import threading
import time

names = ["tinyrl", "tinyrl.trainer", "json.tool", "xml.dom.minidom", "tinyrl.trainer", "tinyrl"]
found, missing, deadlocks, together = [], [], [], threading.Barrier(16)


def get(name):
    for _ in range(100):
        try:
            return importlib.import_module(name)
        except RuntimeError as error:
            if type(error).__name__ != "_DeadlockError" or "_ModuleLock('tinyrl" not in str(error):
                raise
            deadlocks.append(error)
        except KeyError as error:
            missing.append(error)
        time.sleep(0.01)


def load(seed):
    chosen = random.Random(seed).sample(names, len(names))
    together.wait()
    time.sleep(seed % 4 * 0.005)
    found.append({name: get(name).__name__ == name for name in chosen})


threads = [threading.Thread(target=load, args=(seed,)) for seed in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print([error for error in missing if not deadlocks or error.args != ("tinyrl",)])
print(len(found), all(all(each.values()) for each in found), sys.modules["tinyrl"].Trainer().fit())
