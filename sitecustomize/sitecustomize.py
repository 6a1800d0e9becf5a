"""Activation of autoprof where site-packages can't be written: `autoprof run` puts this folder on PYTHONPATH.

Python imports only one sitecustomize. This one removes its folder from `sys.path` and imports the sitecustomize that it
hides, which takes its place in `sys.modules`. If no other exists, this import fails as it would without autoprof, and
Python's `site` ignores the error.
"""

import os
import sys


def _import_hidden(here: str) -> None:
    sys.path[:] = [path for path in sys.path if os.path.realpath(path or ".") != here]
    sys.modules.pop(__name__, None)
    __import__(__name__)


def _activate(here: str) -> None:
    if os.environ.get("AUTOPROF", "").strip().lower() not in ("1", "true", "on", "yes"):
        return
    if sys.version_info < (3, 10):  # noqa: UP036  # a command may start any Python
        return
    try:
        from autoprof import _boot
    except ImportError:
        # In a wheel this folder is autoprof/sitecustomize; in a checkout it is beside autoprof/. The checkout itself
        # may be called autoprof. If its parent is on the path, Python finds the checkout as a namespace package.
        parent = os.path.dirname(here)
        root = os.path.dirname(parent) if os.path.isfile(os.path.join(parent, "_boot", "__init__.py")) else parent
        if not os.path.isfile(os.path.join(root, "autoprof", "_boot", "__init__.py")):
            return
        sys.modules.pop("autoprof", None)
        sys.path.append(root)
        from autoprof import _boot
    _boot.activate()


_here = os.path.dirname(os.path.realpath(__file__))
_error: "BaseException | None" = None
try:
    _import_hidden(_here)
except BaseException as error:
    _error = error
# Not in the clause above: no exception may be being handled while autoprof starts.
_activate(_here)
if _error is not None:
    raise _error
