"""`python -m autoprof.probe FILE`: import every module that a hook names and write down what became of the hooks, and
which tool would record.

Run by `autoprof doctor` in a process of its own, since importing a target takes seconds and may do anything.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from autoprof import _boot, importing, runtime, tools
from autoprof.authoring.source import Sources
from autoprof.hooklog import installed_version


def main(output: str) -> None:
    """Write `{hook: {state, reason, ...}}`, the errors on the way and the tool to `output`."""
    run = runtime.start()
    if run is None:
        return
    for target in _boot.recipe_files():
        importing.load(target)
    sources = Sources()
    for hook in importing.known():
        if importing.left_out(run, hook):
            continue
        # A trainer of the user's own may lie on the path without a distribution.
        if installed_version(hook.recipe) or sources.installed(hook.recipe.target):
            try:
                importlib.import_module(hook.hook.module)
            except BaseException as error:
                run.hooks.skipped(hook, _reason(hook.hook.module, error))
        else:
            run.hooks.skipped(hook, f"{hook.recipe.target} is not installed")
    Path(output).write_text(
        json.dumps(run.hooks.content() | {"tool": tools.outlook(run.settings.tool)}), encoding="utf-8"
    )


def _reason(module: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name is not None and f"{module}.".startswith(f"{error.name}."):
        return f"there is no module {error.name} in this release"
    return f"importing {module} raised {type(error).__name__}: {error}"


if __name__ == "__main__":
    main(sys.argv[1])
