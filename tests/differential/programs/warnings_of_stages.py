"""Warnings in stages, shown once for each place."""

import warnings

from tinyrl import Trainer


def warn():
    warnings.warn("from inside", UserWarning)
    warnings.warn("deprecated", DeprecationWarning)


Trainer().fit(inside=warn)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    Trainer().fit(inside=warn)
print([(str(each.message), each.lineno) for each in caught])
