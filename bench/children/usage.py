"""Runs a command and prints its usage as JSON: `usage.py COMMAND...`.

The usage is the CPU seconds of all its processes, the peak of memory of the largest one in MB, the bytes of output and
the exit status. A child's peak starts at the memory of its parent, so this process is small.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys


def main(command: list[str]) -> dict[str, object]:
    """Run the command and return its usage."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "cpu": used.ru_utime + used.ru_stime,
        "peak": used.ru_maxrss * 1.024e-3,
        "output": len(done.stdout),
        "status": done.returncode,
        "errors": done.stderr[-2000:].decode(errors="replace"),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
