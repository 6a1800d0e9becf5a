"""Report of `autoprof doctor` on an environment or a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from autoprof.cli.documents import Document

# A failed import. ModuleNotFoundError is no problem: it means that an optional dependency is not installed.
_RAISED = re.compile("importing [^ ]+ raised (?!ModuleNotFoundError:)")


class Report(Document, kw_only=True):
    """`autoprof doctor --json`."""

    subject: str  # The environment or the run.
    verdict: str = ""  # The result in one sentence.
    facts: dict[str, str] = {}  # States and figures, by name.
    hooks: list[tuple[str, str, str]] = []  # Each hook, its state and the reason.
    problems: list[str] = []  # Problems, and what to do about them; with problems the exit status is 1.
    notes: list[str] = []  # Other observations.


def problems_found(report: Report) -> str:
    """Return the verdict as the number of problems, in words."""
    count = len(report.problems)
    return f"{count} problem{'' if count == 1 else 's'} found" if count else "no problems found"


def list_hooks(report: Report, hooks: Mapping[str, dict[str, Any]]) -> None:
    """Add the hooks and their problems to a report. Hooks that share a failed import make one problem."""
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
