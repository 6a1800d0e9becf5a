"""Line-by-line differences of programs with autoprof: `python -m tests.differential.diff [--captures] NAME...`"""

from __future__ import annotations

import difflib
import sys
import tempfile
from pathlib import Path

from tests.differential.running import captures, hooks_called, programs


def main(names: list[str]) -> None:
    """Run the named programs, or all, without autoprof and with it, and print the differences."""
    recording = "--captures" in names
    names = [name for name in names if name != "--captures"]
    for program in programs():
        if names and program.name not in names and program.path.stem not in names:
            continue
        if lacking := program.lacks():
            print(f"skipped: {program.name}: {lacking} is not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            off, on = (program.run(Path(folder), on, recording or program.captures) for on in (False, True))
            found = [
                line
                for part in ("stdout", "stderr", "files")
                for line in difflib.unified_diff(getattr(off, part), getattr(on, part), f"off {part}", f"on {part}")
            ]
            if off.status != on.status:
                found.append(f"status {off.status}, {on.status}\n")
            calls, states = hooks_called(Path(folder) / "runs"), captures(Path(folder) / "runs")
            print(f"{'DIFFERS' if found else 'same'}: {program.name}: {off.status}, {calls} hooks, captures: {states}")
            print("".join(found), end="")
            if len(names) == 1:
                print("".join([*off.stdout, *off.stderr]))


main(sys.argv[1:])
