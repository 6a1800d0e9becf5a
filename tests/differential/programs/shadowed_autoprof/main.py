#: differs: a module of this name is hidden by autoprof, which is there before it
#: hooks: unseen
"""A module of the user's own that is called autoprof."""

import autoprof
from tinyrl import Trainer

print(getattr(autoprof, "MINE", "another"), Trainer().fit())
