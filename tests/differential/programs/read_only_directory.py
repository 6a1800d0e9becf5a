#: hooks: unseen
#: set: AUTOPROF_DIR=/proc/autoprof
"""AUTOPROF_DIR in which no folder can be created."""

from tinyrl import Trainer

print(Trainer().fit())
