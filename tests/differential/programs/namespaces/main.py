"""Namespace packages in two folders, one of which is added later."""

import sys

sys.path[:0] = ["first", "second"]
import space.one.work
import space.two.work

print(space.one.work.Trainer().fit(), space.two.work.Trainer().fit(), sorted(space.__path__), space.__spec__.loader)
print(space.__file__ if hasattr(space, "__file__") else None)
