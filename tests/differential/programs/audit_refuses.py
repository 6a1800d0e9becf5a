"""Audit hook that forbids to open files, to import, and to compile."""

import sys

from tinyrl import Trainer

Trainer().fit(1)
refuse = False


def hook(event, arguments):
    if refuse and event in ("open", "import", "compile", "exec", "os.mkdir", "os.listdir", "subprocess.Popen"):
        raise PermissionError(event)


sys.addaudithook(hook)
refuse = True
found = Trainer().fit(), Trainer().update(lambda: 5)
try:
    Trainer().update(open, "file")
except PermissionError as error:
    found += (repr(error),)
refuse = False
print(found)
