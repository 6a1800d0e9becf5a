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
from autoprof.hooklog import installed_version


def main(output: str) -> None:
    """Write `{hook: {state, reason, ...}}`, the errors on the way and the tool to `output`."""
    run = runtime.start()
    if run is None:
        return
    for target in _boot.recipe_files():
        importing.load(target)
    for hook in importing.known():
        version = installed_version(hook.recipe)
        if not version:
            run.hooks.skipped(hook, f"{hook.recipe.target} is not installed")
        elif reason := importing.out_of_range(hook, version):
            # Without an import: the module may well be missing in this version, which says less.
            run.hooks.skipped(hook, reason)
        else:
            try:
                importlib.import_module(hook.hook.module)
            except BaseException as error:
                run.hooks.skipped(hook, f"importing {hook.hook.module} raised {type(error).__name__}: {error}")
    Path(output).write_text(
        json.dumps(run.hooks.content() | {"tool": tools.outlook(run.settings.tool)}), encoding="utf-8"
    )


if __name__ == "__main__":
    main(sys.argv[1])
