#: hooks: unseen
#: set: AUTOPROF_DIR=/proc/autoprof
#: differs: defect 2: endless recursion where a folder can't be made
"""Runs should lie where none can be made."""

from tinyrl import Trainer

print(Trainer().fit())
