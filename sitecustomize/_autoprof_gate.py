"""Test of the environment before any module of autoprof is imported.

`autoprof.start` (PEP 829) and the entry points of verl and vLLM name this module. So a process without `AUTOPROF=1`
imports only these few lines. `autoprof.pth` has the same test in one line. verl loads its entry point and does not call
it (verl 0.9.1, `verl/__init__.py`), hence the call at the end.
"""

import os


def activate() -> None:
    """Activate autoprof in this process if `AUTOPROF` is on. Repeated calls have no effect."""
    if os.environ.get("AUTOPROF", "").strip().lower() not in ("1", "true", "on", "yes"):
        return
    try:
        from autoprof import _boot
    except ImportError:  # the package was uninstalled, but this file was not
        return
    _boot.activate()


activate()
