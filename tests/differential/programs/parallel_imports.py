#: captures: no
"""Hooked packages and their modules are imported in many threads at once, in every order."""

import importlib
import random
import sys
import threading
import time

names = ["tinyrl", "tinyrl.trainer", "json.tool", "xml.dom.minidom", "tinyrl.trainer", "tinyrl"]
found, together = [], threading.Barrier(16)


def load(seed):
    chosen = random.Random(seed).sample(names, len(names))
    together.wait()
    time.sleep(seed % 4 * 0.005)
    found.append({name: importlib.import_module(name).__name__ == name for name in chosen})


threads = [threading.Thread(target=load, args=(seed,)) for seed in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(found), all(all(each.values()) for each in found), sys.modules["tinyrl"].Trainer().fit())
