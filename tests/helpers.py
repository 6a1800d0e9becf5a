"""What tests share that is no fixture."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def clean_environment(**variables: str) -> dict[str, str]:
    """The environment without autoprof's variables and without PYTHONPATH, plus `variables`."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("AUTOPROF") and name != "PYTHONPATH"
    }
    return kept | variables
