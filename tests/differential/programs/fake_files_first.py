#: captures: no
#: hooks: none
#: needs: pyfakefs
"""Trainer that is first imported in a fake file system."""

import os

from pyfakefs.fake_filesystem_unittest import Patcher

with Patcher():
    from tinyrl import Trainer

    print(Trainer().fit(2), sum(len(names) for _, _, names in os.walk("/")))
print(Trainer().fit(2))
