#: captures: no
"""Slow package whose modules import it, in several threads."""

import importlib
import threading
import time

found = []


def load(name, wait):
    time.sleep(wait)
    found.append(importlib.import_module(name).VALUE)


threads = [
    threading.Thread(target=load, args=arguments)
    for arguments in (("slowpkg", 0), ("slowpkg.actor", 0.05), ("tinyrl_user", 0.02), ("slowpkg.other", 0.1))
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sorted(found))
