#: captures: no
"""Hooked packages and their modules are imported in many threads at once, in every order."""

import importlib
import random
import sys
import threading
import time

names = ["tinyrl", "tinyrl.trainer", "json.tool", "xml.dom.minidom", "tinyrl.trainer", "tinyrl"]
found, together = [], threading.Barrier(16)


def get(name):
    while True:
        try:
            return importlib.import_module(name)
        except RuntimeError:  # CPython's own: one thread imports a package that imports a module, another that module
            time.sleep(0.001)


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
print(len(found), all(all(each.values()) for each in found), sys.modules["tinyrl"].Trainer().fit())
