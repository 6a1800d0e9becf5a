#: python: -i -q {script}
#: stdin: print(Trainer().fit(1))
"""Interactive session after a script."""

from tinyrl import Trainer

print(Trainer().fit())
