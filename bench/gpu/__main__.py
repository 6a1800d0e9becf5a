"""Command line: `python -m bench.gpu [--device cuda|cpu] [--wheels FOLDER] [--out FOLDER] [ROWS...]`."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.gpu import wheels, workbench
from bench.gpu.rows import ROWS
from bench.gpu.runner import PAGE, Runner

# autoprof's own dependencies.
NEEDED = ("wrapt", "msgspec", "packaging", "rich", *(["tomli"] if sys.version_info < (3, 11) else []))


def tell(line: str) -> None:
    """Print a line and flush."""
    print(line, flush=True)


def main(given: Sequence[str] | None = None) -> int:
    """Run all rows, or the named ones. Return 1 if something failed, else 0."""
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Show what autoprof does on this GPU.")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"rows to run: {', '.join(names)} (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: run the parts that need no GPU")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for missing packages (make gpu-wheels)")
    parser.add_argument("--out", type=Path, default=Path("gpu_results"), help="folder of the results")
    parsed = parser.parse_args(given)
    if unknown := set(parsed.rows) - set(names):
        parser.error(f"there is no row {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if parsed.wheels and not parsed.wheels.is_dir():
        parser.error(f"--wheels: there is no folder {parsed.wheels}; make gpu-wheels makes one")
    try:
        parsed.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {parsed.out} can't be made: {error.strerror}; give OUT=, a folder that can be written")
    # Later rows need the machine's description, which the row `machine` makes.
    chosen = [row for row in ROWS if not parsed.rows or row.name in (*parsed.rows, "machine")]
    with tempfile.TemporaryDirectory(prefix="autoprof-wheels-") as folder:
        # dill, used by datasets, pickles modules by value if their folder has another name.
        packages = [Path(folder) / "site-packages"]
        unpacked = wheels.unpack(parsed.wheels, packages[0]) if parsed.wheels else []
        if unpacked:
            tell(f"from {parsed.wheels}: {', '.join(unpacked)}")
        if absent := workbench.absent(NEEDED, packages):
            return _cannot(
                f"{', '.join(absent)}: not installed for {sys.executable}; give WHEELS=FOLDER (make gpu-wheels)"
            )
        if absent := workbench.absent(["torch"], packages):
            return _cannot(f"torch is not installed for {sys.executable}; give PYTHON=, the interpreter that has it")
        status = Runner(parsed.device, parsed.out.resolve(), packages, bool(parsed.rows), tell).run(chosen)
    if parsed.device == "cuda" and not parsed.rows:
        try:
            shutil.copyfile(parsed.out / PAGE, workbench.ROOT / "bench" / PAGE)
        except OSError as error:
            tell(f"bench/{PAGE} was not written: {error.strerror}; copy {parsed.out / PAGE}")
    return status


def _cannot(reason: str) -> int:
    print(f"make gpu: {reason}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
