#: set: AUTOPROF_LOG=warning
#: set: PYTHONIOENCODING=utf-16
#: set: LANG=tr_TR.UTF-8
"""Output in UTF-16."""

from tinyrl import Trainer

print(Trainer().fit(), "ä")
