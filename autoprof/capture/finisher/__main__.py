"""Entry point of `python -m autoprof.capture.finisher`, which finishes the capture that stdin describes."""

import sys

# `python -m` puts the folder of the packages first in `sys.path`. This moves the folder to the end, because modules in
# the folder must not replace modules of the standard library.
sys.path.append(sys.path.pop(0))

from autoprof.capture.finisher import job

if __name__ == "__main__":
    job.main()
