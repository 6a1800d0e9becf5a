"""The tiny model with random weights and its data, made once on a machine: those of the example, for all releases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.helpers import ROOT, clean_environment

_EXAMPLE = ROOT / "examples" / "verl_cpu"


def assets() -> Path:
    """The folder that has them, in `data`."""
    folder = _EXAMPLE / ".assets"
    make = [sys.executable, str(_EXAMPLE / "make_assets.py"), str(folder)]
    subprocess.run(make, check=True, capture_output=True, env=clean_environment(), timeout=240)
    return folder


def tiny_model() -> str:
    """The model."""
    return str(assets() / "data" / "model")
