"""Filters of warnings, their registries, and warnings shown only once."""

import sys
import warnings

from tinyrl import Trainer

before = list(warnings.filters)
Trainer().fit()
print(warnings.filters == before, warnings.showwarning.__module__, sys.warnoptions)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    print(Trainer().fit(1))
    try:
        Trainer().fit(1, lambda: warnings.warn("now an error"))
    except UserWarning as error:
        print(repr(error))
for _ in range(3):
    Trainer().fit(1, lambda: warnings.warn("once"))
