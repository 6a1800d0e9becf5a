#: differs: autoprof is imported first and hides a module with the same name
#: hooks: unseen
"""Module of the user named autoprof."""

import autoprof
from tinyrl import Trainer

print(getattr(autoprof, "MINE", "another"), Trainer().fit())
