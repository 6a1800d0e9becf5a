"""Prints the usage of a command as JSON: `usage.py COMMAND...`.

CPU seconds of all its processes, the peak of memory of the largest one in MB, bytes of output, exit status. This
process is small: the peak of a child starts at the memory of its parent.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys


def main(command: list[str]) -> dict[str, object]:
    """Run the command."""
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
