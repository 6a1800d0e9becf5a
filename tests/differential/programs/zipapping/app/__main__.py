import importlib.resources
import inspect
import sys

import inside
import tinyrl

print(sys.argv[1:], __name__, __spec__.name, type(__loader__).__name__, type(inside.__loader__).__name__)
print(tinyrl.Trainer().fit(), inside.Mine().fit(), inspect.getsource(inside).splitlines()[0])
print(importlib.resources.files(inside).name)
1 / 0
