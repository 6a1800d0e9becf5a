"""Ends a run in the process that started it and prints the usage as JSON: `run_end.py FOLDER RANKS STEPS GPUS`.

The usage is the CPU seconds of the end without imports, and the peak of this process's memory in MB.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from bench.large_runs import finish
from bench.large_shapes import Shape


def main(folder: Path, shape: Shape) -> dict[str, float]:
    """End the run again, and return the usage of this process."""
    before = time.process_time()
    finish(folder, shape)
    seconds = time.process_time() - before
    return {"cpu": seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024e-3}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Shape(*map(int, sys.argv[2:])))))
