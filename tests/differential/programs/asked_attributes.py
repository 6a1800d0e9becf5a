#: differs: hooks read their options from the instance, so a counting __getattribute__ sees more reads of global_step
"""Class that counts reads of its instances' attributes."""

import collections

from tinyrl import Trainer


class Asked(Trainer):
    asked = collections.Counter()

    def __getattribute__(self, name):
        type(self).asked[name] += 1
        return super().__getattribute__(name)


Asked().fit()
print(Asked.asked)
