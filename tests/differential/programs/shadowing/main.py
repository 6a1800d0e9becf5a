#: hooks: unseen
"""Files beside the script with the names of modules that autoprof uses."""

import sys

from tinyrl import Trainer

print(Trainer().fit())
import log
import msgspec
import recipe
import wrapt

print(log.MINE, recipe.MINE, wrapt.MINE, msgspec.MINE, [name for name in ("log", "recipe") if name in sys.modules])
