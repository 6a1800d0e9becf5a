#: needs: coverage
"""Coverage of a hooked module, through coverage's API."""

import coverage

measured = coverage.Coverage(data_file=None, branch=True)
measured.start()
from tinyrl import Trainer

Trainer().fit(1)
measured.stop()
data = measured.get_data()
for path in sorted(data.measured_files()):
    if path.endswith("trainer.py"):
        print(sorted(data.lines(path)), measured.analysis2(path)[3])
