"""Module that replaces itself in sys.modules, and one that is a class."""

import pathlib
import sys
import types

pathlib.Path("itself.py").write_text(
    "import sys, types\nimport tinyrl\nclass M(types.ModuleType):\n"
    "    fit = property(lambda self: tinyrl.Trainer().fit())\nsys.modules[__name__] = M(__name__)\n"
)
sys.path.insert(0, ".")
import itself

print(type(itself).__name__, itself.fit)
import tinyrl.trainer


class Frozen(types.ModuleType):
    def __setattr__(self, name, value):
        raise AttributeError("frozen")


tinyrl.trainer.__class__ = Frozen
print(tinyrl.Trainer().fit())
