#: python: -S {script} --flag -O word
#: hooks: none
"""Interpreter started with -S."""

import os
import sys
import warnings

sys.path.insert(0, os.environ["LIBRARY"])
from tinyrl import Trainer  # noqa: E402

print(sys.argv, sys.flags, sys._xoptions, sys.warnoptions, len(warnings.filters), __debug__)


def work():
    assert len(sys.argv) == 4
    return os.path.basename(sys.argv[0])


print(Trainer().fit(inside=work), sys.orig_argv[1:], sys.path[0] == os.environ["LIBRARY"], sys.dont_write_bytecode)
Trainer().update(int, "x")
