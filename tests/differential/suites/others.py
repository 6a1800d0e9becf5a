"""Suite for pytest in a step and a stage: `others.py FOLDER FILE...` prints each test with its result."""

import os
import sys

import pytest
import torch  # noqa: F401
from tinyrl import Trainer


class Says:
    """Plug-in of pytest that prints each test with its result."""

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            print(f"\n{report.nodeid} {report.when} {report.outcome}", flush=True)


class Suite(Trainer):
    """Trainer that does not generate, and runs the whole suite as an update."""

    def generate(self, inside=None):
        return None


def tests():
    folder, *files = sys.argv[1:]
    os.chdir(folder)
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-n", "0", *files], plugins=[Says()])


if __name__ == "__main__":
    Suite().fit(1, tests)
