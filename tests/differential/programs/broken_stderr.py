"""sys.stderr replaced by None, by a stream that raises, or by another object."""

import io
import sys

from tinyrl import Trainer


class Raises(io.TextIOBase):
    def write(self, text):
        raise RuntimeError("don't write")

    def flush(self):
        raise RuntimeError("don't flush")


print(Trainer().fit())
for stream in (None, Raises(), 5, io.StringIO()):
    sys.stderr = stream
    print(Trainer().fit(), Trainer().update(lambda: 2))
print(repr(sys.stderr.getvalue()))
sys.stderr = sys.__stderr__
