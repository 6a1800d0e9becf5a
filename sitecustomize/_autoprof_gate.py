"""Test of the environment before anything of autoprof is imported.

`autoprof.pth`, `autoprof.start` (PEP 829) and the entry points of verl and vLLM all name this module, so that a
process that runs without `AUTOPROF=1` imports these few lines and nothing more. verl only loads its entry point and
does not call it (verl 0.9.1, `verl/__init__.py`), hence the call at the end.
"""

import os


def activate() -> None:
    """Activate autoprof in this process if `AUTOPROF` asks for it. May be called any number of times."""
    if os.environ.get("AUTOPROF", "").strip().lower() not in ("1", "true", "on", "yes"):
        return
    try:
        from autoprof import _boot
    except ImportError:  # the package was uninstalled and this file was left behind
        return
    _boot.activate()


activate()
