"""CPython's own tests in a step and a stage: `cpython.py test.test_x ...` prints each test with its result."""

import sys
import unittest

import torch  # noqa: F401
from test import support
from tinyrl import Trainer


class Result(unittest.TextTestResult):
    """Test result that prints each test with its result."""

    def say(self, test, how):
        print(f"{test.id()} {how}", flush=True)

    def addSuccess(self, test):
        self.say(test, "passed")
        super().addSuccess(test)

    def addError(self, test, error):
        self.say(test, f"error {error[0].__name__}")
        super().addError(test, error)

    def addFailure(self, test, error):
        self.say(test, "failed")
        super().addFailure(test, error)

    def addSkip(self, test, reason):
        self.say(test, "skipped")
        super().addSkip(test, reason)

    def addExpectedFailure(self, test, error):
        self.say(test, "failed as expected")
        super().addExpectedFailure(test, error)

    def addSubTest(self, test, subtest, error):
        if error is not None:
            self.say(test, "failed in a sub-test")
        super().addSubTest(test, subtest, error)


class Suite(Trainer):
    """Trainer that does not generate, and runs the whole suite as an update."""

    def generate(self, inside=None):
        return None

    def update(self, inside=None):
        return super().update(inside)


def tests():
    support.use_resources = []
    names = sys.argv[1:]
    sys.argv[1:] = []
    unittest.TextTestRunner(resultclass=Result).run(unittest.defaultTestLoader.loadTestsFromNames(names))


if __name__ == "__main__":
    Suite().fit(1, tests)
