"""runpy: a file, a module, and a hooked module as __main__."""

import pathlib
import runpy
import sys

pathlib.Path("script.py").write_text("from tinyrl import Trainer\nfound = Trainer().fit()\nprint(__name__, found)\n")
print(runpy.run_path("script.py", run_name="mine")["found"])
found = runpy.run_module("tinyrl.trainer", run_name="tinyrl.trainer", alter_sys=True)
print(found["Trainer"]().fit(), "tinyrl.trainer" in sys.modules)
code = compile("import tinyrl; print(tinyrl.Trainer().fit())", "<made>", "exec")
exec(code, {})
