#: set: LANG=C
#: set: LC_ALL=C
#: set: PYTHONUTF8=0
#: set: PYTHONCOERCECLOCALE=0
"""C locale without UTF-8 mode."""

import locale
import sys

from tinyrl import Trainer

print(locale.getlocale(), sys.getfilesystemencoding(), sys.stdout.encoding, sys.flags.utf8_mode)
Trainer("ä").fit(1, lambda: open("ä".encode().decode("ascii", "surrogateescape"), "w").close())
try:
    Trainer().fit(1, lambda: print("ä"))
except UnicodeEncodeError as error:
    print(error)
