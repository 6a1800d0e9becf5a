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
        version = installed_version(hook.recipe)
        if run.settings.disabled(hook.key.partition("/")[0], hook.hook.name):
            run.hooks.skipped(hook, "AUTOPROF_DISABLE names it")
        elif reason := importing.out_of_range(hook, version) if version else "":
            # Without an import: the module may well be missing in this version, which says less.
            run.hooks.skipped(hook, reason)
        # A trainer of the user's own may lie on the path without a distribution.
        elif version or sources.installed(hook.recipe.target):
            try:
                importlib.import_module(hook.hook.module)
            except BaseException as error:
                run.hooks.skipped(hook, f"importing {hook.hook.module} raised {type(error).__name__}: {error}")
        else:
            run.hooks.skipped(hook, f"{hook.recipe.target} is not installed")
    Path(output).write_text(
        json.dumps(run.hooks.content() | {"tool": tools.outlook(run.settings.tool)}), encoding="utf-8"
    )


if __name__ == "__main__":
    main(sys.argv[1])
