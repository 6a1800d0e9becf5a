"""`python -m autoprof.capture.finisher`: finish the capture that stdin describes."""

import sys

# `-m` puts the folder of the packages first. Nothing in it may stand in for a module of the standard library.
sys.path.append(sys.path.pop(0))

from autoprof.capture.finisher import job

if __name__ == "__main__":
    job.main()
