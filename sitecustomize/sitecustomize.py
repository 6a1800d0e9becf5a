"""Activation of autoprof where site-packages can't be written: `autoprof run` puts this folder on PYTHONPATH.

Python imports one sitecustomize only, so this one first runs the sitecustomize that it hides.
"""

import os
import sys


def _run_hidden_sitecustomize(here: str) -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    paths = [path for path in sys.path if os.path.realpath(path or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", paths)
    if spec is None or spec.loader is None:  # a folder of that name without __init__.py has no loader to run
        return
    module = module_from_spec(spec)
    ours = sys.modules.get("sitecustomize")
    sys.modules["sitecustomize"] = module
    try:
        spec.loader.exec_module(module)
    finally:
        if ours is not None:
            sys.modules["sitecustomize"] = ours


def _activate(here: str) -> None:
    if os.environ.get("AUTOPROF", "").strip().lower() not in ("1", "true", "on", "yes"):
        return
    try:
        from autoprof import _boot
    except ImportError:
        # In a wheel this folder is autoprof/sitecustomize, in a checkout it lies beside autoprof/. The checkout may be
        # called autoprof, too, and be found as a namespace package where the folder that it is in is on the path.
        parent = os.path.dirname(here)
        root = os.path.dirname(parent) if os.path.isfile(os.path.join(parent, "_boot", "__init__.py")) else parent
        if not os.path.isfile(os.path.join(root, "autoprof", "_boot", "__init__.py")):
            return
        sys.modules.pop("autoprof", None)
        sys.path.append(root)
        from autoprof import _boot
    _boot.activate()


_here = os.path.dirname(os.path.realpath(__file__))
try:
    _run_hidden_sitecustomize(_here)
finally:
    _activate(_here)
