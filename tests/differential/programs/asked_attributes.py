#: differs: options of hooks are read from the instance: a counting __getattribute__ sees global_step more often
"""Reads of an instance's attributes are counted by its class."""

import collections

from tinyrl import Trainer


class Asked(Trainer):
    asked = collections.Counter()

    def __getattribute__(self, name):
        type(self).asked[name] += 1
        return super().__getattribute__(name)


Asked().fit()
print(Asked.asked)
