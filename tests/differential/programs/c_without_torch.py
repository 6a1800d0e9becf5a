#: captures: yes
"""Captured program that does not import torch: autoprof does not import it either."""

import sys

from tinyrl import Trainer

print(Trainer().fit(3, lambda: "torch" in sys.modules))
print("torch" in sys.modules)
