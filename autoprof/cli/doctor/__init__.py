"""Report of `autoprof doctor` on an environment or a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from autoprof.cli.documents import Document

# Reason of a hook whose module could not be imported. ModuleNotFoundError is excepted, because it only means that an
# optional dependency is not installed.
_RAISED = re.compile("importing [^ ]+ raised (?!ModuleNotFoundError:)")


class Report(Document, kw_only=True):
    """The output of `autoprof doctor --json`."""

    subject: str  # The environment or the run that was checked.
    verdict: str = ""  # The result of the checks in one sentence.
    facts: dict[str, str] = {}  # Facts about the environment or the run, by name.
    hooks: list[tuple[str, str, str]] = []  # For each hook: its key, its state, and the reason for the state.
    problems: list[str] = []  # Problems, and what to do about them. If there are any, the exit status is 1.
    notes: list[str] = []  # Observations that are no problems.


def problems_found(report: Report) -> str:
    """Return the verdict: a text with the number of problems, such as `2 problems found`."""
    count = len(report.problems)
    return f"{count} problem{'' if count == 1 else 's'} found" if count else "no problems found"


def list_hooks(report: Report, hooks: Mapping[str, dict[str, Any]]) -> None:
    """Add the hooks and the problems of failed hooks to a report. Hooks that share a failed import make one problem.

    `hooks` is a dict from hook key to a dict with `state` and `reason`. For a run, the inner dict also has `fired`.
    """
    failures: dict[tuple[str, str], list[str]] = {}
    for key, hook in sorted(hooks.items()):
        reason = hook["reason"] or (hook.get("fired", "") if hook["state"] == "applied" else "")
        report.hooks.append((key, hook["state"], reason))
        if hook["state"] == "failed":
            failures.setdefault((key, hook["reason"]), []).append(key)
        elif _RAISED.match(hook["reason"]):
            failures.setdefault(("", hook["reason"]), []).append(key)
    for (_, reason), keys in failures.items():
        report.problems.append(f"hook{'s' if len(keys) > 1 else ''} {', '.join(keys)}: {reason}")
