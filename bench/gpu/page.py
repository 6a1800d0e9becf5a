"""The table in Markdown, from the JSON: `python -m bench.gpu.page gpu.json > bench/GPU.md`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.gpu.facts import FAIL, PASS, SKIPPED

TITLE = "# On a GPU\n"


def render(results: Mapping[str, Any]) -> str:
    """Return the page."""
    rows = results["rows"]
    counts = ", ".join(f"{sum(row['state'] == state for row in rows)} {state}" for state in (PASS, FAIL, SKIPPED))
    parts = [TITLE, f"Made by `make gpu`. {_machine(results)}\n", f"**Rows: {counts}.**{_ended(results)}\n"]
    parts.append("| row | result | seconds | |\n|---|---|---|---|")
    parts += [f"| {row['name']} | {row['state']} | {row['seconds']:.0f} | {_cell(_note(row))} |" for row in rows]
    for row in rows:
        if row["facts"]:
            parts.append(f"\n## {row['name']}\n\n{row['about']}.\n\n| fact | result | figure |\n|---|---|---|")
            parts += [f"| {_cell(fact['text'])} | {fact['state']} | {_cell(fact['figure'])} |" for fact in row["facts"]]
    return "\n".join(parts) + "\n"


def _machine(results: Mapping[str, Any]) -> str:
    """Describe the machine without a name that identifies it."""
    found = results["machine"]
    if not found:
        return f"{results['started']}; the row `machine` has not run."
    words = [results["started"], found["device"]]
    if found["devices"]:
        words += [f"{found['devices']} x {found['memory_gb']} GB", f"driver {found['driver'] or 'unknown'}"]
        words.append(f"ROCm {found['hip']}" if found["hip"] else f"CUDA {found['cuda']}")
    words += [f"{found['cores']} cores", f"Python {found['python']}", "root" if found["root"] else "not root"]
    return ", ".join([*words, *(f"{name} {release}" for name, release in found["versions"].items())]) + "."


def _ended(results: Mapping[str, Any]) -> str:
    took = f" {results['seconds']:.0f} s."
    return took if results["finished"] else f"{took} The run was cut off, or is still running: rows are missing."


def _note(row: Mapping[str, Any]) -> str:
    """Return the reason why a row was skipped or failed, with its logs, or else its title."""
    failed = [fact["text"] for fact in row["facts"] if fact["state"] == FAIL]
    if row["state"] == FAIL:
        return f"{'; '.join([*failed, *filter(None, [row['reason']])])} ({', '.join(row['logs'])})"
    return row["reason"] if row["state"] == SKIPPED else f"{row['about']}"


def _cell(text: str) -> str:
    return " ".join(str(text).replace("|", "\\|").split())


if __name__ == "__main__":
    sys.stdout.write(render(json.loads(Path(sys.argv[1]).read_text())))
