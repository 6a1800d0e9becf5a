#: shell: $PYTHON -m unittest -v unittest_suite.py 2>&1 | sed 's/ in [0-9.]*s//'
"""unittest with asynchronous tests, sub-tests and failures."""

import unittest

from tinyrl import Trainer


class Tests(unittest.IsolatedAsyncioTestCase):
    def test_sync(self):
        for number in range(3):
            with self.subTest(number=number):
                self.assertEqual(Trainer().update(lambda number=number: number), 1)

    async def test_async(self):
        self.assertEqual(await Trainer().afit(), ["step", "step"])

    async def test_logs(self):
        with self.assertNoLogs():
            Trainer().fit()

    def test_raises(self):
        with self.assertRaisesRegex(ValueError, "x"):
            Trainer().update(int, "x")

    def test_warns(self):
        with self.assertWarns(ResourceWarning):
            Trainer().update(lambda: __import__("warnings").warn("w", ResourceWarning))
