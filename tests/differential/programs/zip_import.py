"""Hooked package in a zip file."""

import os
import pathlib
import sys
import zipfile

library = pathlib.Path(os.environ["LIBRARY"])
with zipfile.ZipFile("lib.zip", "w") as archive:
    for path in sorted(library.glob("tinyrl/*.py")):
        archive.writestr(zipfile.ZipInfo(str(path.relative_to(library))), path.read_text())
sys.path.insert(0, "lib.zip")
import tinyrl

print(tinyrl.__file__, type(tinyrl.__loader__).__name__, tinyrl.Trainer().fit(), tinyrl.score(["a"]))
