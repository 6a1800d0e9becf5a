#: python: -B {script} --flag -O word
#: python:  {script} --flag -O word
#: python: -I {script} --flag -O word
#: python: -O {script} --flag -O word
#: python: -OO {script} --flag -O word
#: python: -P {script} --flag -O word
#: python: -W error {script} --flag -O word
#: python: -bb {script} --flag -O word
#: python: -X dev {script} --flag -O word
#: python: -X faulthandler {script} --flag -O word
#: python: -X frozen_modules=off {script} --flag -O word
#: python: -X int_max_str_digits=640 {script} --flag -O word
#: python: -X no_debug_ranges {script} --flag -O word
#: python: -q {script} --flag -O word
#: python: -s {script} --flag -O word
#: python: -X tracemalloc=5 {script} --flag -O word
#: python: -u {script} --flag -O word
#: python: -X utf8 {script} --flag -O word
#: python: -X warn_default_encoding {script} --flag -O word
#: python: -x {script} --flag -O word
#: python: -X importtime {script} --flag -O word
#: ignore: ^import time:
#: python: -v {script} --flag -O word
#: ignore: ^(#|import |Python |\[GCC|Type )
#: python: -S {script} --flag -O word
#: hooks: none
"""Interpreter started with various flags."""

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
