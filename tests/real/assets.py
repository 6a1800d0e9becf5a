"""Tiny model with random weights, and its data, from the example; all releases use them. They are made once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.helpers import ROOT, clean_environment

_EXAMPLE = ROOT / "examples" / "verl_cpu"


def assets() -> Path:
    """Make the model and its data if they don't exist, and return their folder; they are in `data`."""
    folder = _EXAMPLE / ".assets"
    make = [sys.executable, str(_EXAMPLE / "make_assets.py"), str(folder)]
    subprocess.run(make, check=True, capture_output=True, env=clean_environment(), timeout=240)
    return folder


def tiny_model() -> str:
    """Return the path of the model."""
    return str(assets() / "data" / "model")
