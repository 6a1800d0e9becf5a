#: hooks: unseen
#: set: AUTOPROF_DIR=/proc/autoprof
"""Runs should lie where none can be made."""

from tinyrl import Trainer

print(Trainer().fit())
