"""Wheels for a machine without network: `python -m bench.gpu.wheels --python-version 3.12 FOLDER` gets them.

`make gpu WHEELS=FOLDER` unpacks missing packages into a temporary folder, which only its own programs have on their
path.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
MOST_BYTES = 60_000_000
# Platforms of torch's own wheels.
_PLATFORMS = ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
# Parts of wheels that no program here imports: half of the bytes.
_UNUSED = re.compile(
    r"/tests/|^pyarrow/(include/|src/|libarrow(_python)?_flight\.so|_flight|libarrow_s3\.so|_s3fs|.*\.p(yx|xd|xi)$)"
    r"|\.data/data/"
)
_SCHEME = re.compile(r"^[^/]+\.data/(?:purelib|platlib)/")


def download(folder: Path, python: str, machine: str = "x86_64") -> None:
    """Download the wheels for a release of Python by pip, and remove unused parts.

    Raises:
        SystemExit: pip failed, or the wheels together are too large.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", f"--dest={folder}"]
    command += [f"--platform={name}_{machine}" for name in _PLATFORMS]
    done = subprocess.run([*command, f"--requirement={REQUIREMENTS}"], check=False)
    if done.returncode:
        raise SystemExit(f"pip could not download the wheels for Python {python}; its own message is above")
    for wheel in folder.glob("*.whl"):
        slim(wheel)
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    if size > MOST_BYTES:
        raise SystemExit(
            f"{folder}: the wheels have {size / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f}; empty the folder"
        )
    print(f"{folder}: {len(list(folder.glob('*.whl')))} wheels, {size / 1e6:.1f} MB")


def slim(wheel: Path) -> None:
    """Rewrite a wheel without unused parts. Only `unpack` accepts it afterwards."""
    part = wheel.with_name(f"{wheel.name}.part")
    with zipfile.ZipFile(wheel) as source:
        kept = [entry for entry in source.infolist() if not _UNUSED.search(entry.filename)]
        if len(kept) == len(source.infolist()):
            return
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
            for entry in kept:
                target.writestr(entry, source.read(entry), zipfile.ZIP_DEFLATED)
    part.replace(wheel)


def unpack(folder: Path, into: Path) -> list[str]:
    """Unpack the wheels whose packages this interpreter lacks; return their names."""
    found = []
    for wheel in sorted(folder.glob("*.whl")):
        name, release = wheel.name.split("-")[:2]
        if _installed(name):
            continue
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                entry.filename = _SCHEME.sub("", entry.filename)
                if ".." not in Path(entry.filename).parts and ".data/" not in entry.filename:
                    archive.extract(entry, into)
        found.append(f"{name} {release}")
    return found


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def main(given: Sequence[str] | None = None) -> None:
    """Download the wheels for the release of Python on the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.wheels", description="Get the wheels for make gpu.")
    parser.add_argument("--python-version", default="3.12", help="release of Python on the machine with the GPU")
    parser.add_argument("--machine", default="x86_64", help="its processor: x86_64 or aarch64")
    parser.add_argument("folder", type=Path)
    parsed = parser.parse_args(given)
    if not re.fullmatch(r"3\.1[0-3]", parsed.python_version):
        parser.error(f"--python-version: {parsed.python_version!r} is none of 3.10, 3.11, 3.12 and 3.13")
    download(parsed.folder, parsed.python_version, parsed.machine)


if __name__ == "__main__":
    main()
