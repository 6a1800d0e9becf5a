"""`python -m autoprof.cli.doctor.probe FILE`: imports the module of each hook, and writes the hooks' states to a file.

`autoprof doctor --deep` runs it in a separate process, since importing a target takes seconds and may do anything.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from autoprof import _boot, agent
from autoprof.capture import profilers
from autoprof.cli.recipes.lookup import Sources, import_problem
from autoprof.hooks import registry
from autoprof.hooks.recipe import installed_version
from autoprof.run import runtime

NOT_INSTALLED = "is not installed"


def main(output: str) -> None:
    """Write the hooks with their states and reasons, the errors and the tool to the file `output`, as JSON."""
    run = runtime.start()
    if run is None:
        return
    for target in _boot.recipe_files():
        agent.load(target)
    sources = Sources()
    for hook in registry.known_hooks():
        if registry.left_out(run, hook):
            continue
        # The user's own trainer may be on sys.path without a distribution.
        if installed_version(hook.recipe) or sources.installed(hook.recipe.target):
            if problem := import_problem(hook.hook.module):
                run.hooks.skipped(hook, problem)
        else:
            run.hooks.skipped(hook, f"{hook.recipe.target} {NOT_INSTALLED}")
    content = {
        "hooks": {key: {"state": line.state, "reason": line.reason} for key, line in run.hooks.hooks.items()},
        "errors": {where: {"last": line.last} for where, line in run.hooks.errors.items()},
        "versions": run.hooks.versions,
        "tool": profilers.outlook(run.settings.tool),
    }
    Path(output).write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
