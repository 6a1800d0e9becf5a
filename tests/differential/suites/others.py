"""A suite of pytest's, inside of a step and a stage: `others.py FOLDER FILE...` prints each test and how it ended."""

import os
import sys

import pytest
import torch  # noqa: F401
from tinyrl import Trainer


class Says:
    """Says of each test how it ended."""

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            print(f"\n{report.nodeid} {report.when} {report.outcome}", flush=True)


class Suite(Trainer):
    """Generates nothing: the whole suite is an update."""

    def generate(self, inside=None):
        return None


def tests():
    folder, *files = sys.argv[1:]
    os.chdir(folder)
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-n", "0", *files], plugins=[Says()])


if __name__ == "__main__":
    Suite().fit(1, tests)
