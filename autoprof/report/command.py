"""`autoprof report`: where the time of a run's steps went."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPORT = "report.html"


def add(commands: Any, parent: Callable[[argparse.Namespace], Path]) -> argparse.ArgumentParser:
    """Add the command to those of the parser; `parent` gives the folder of the runs."""
    parser: argparse.ArgumentParser = commands.add_parser("report", help="say where the time of each step went")
    parser.add_argument("name", nargs="?", metavar="RUN", default="latest", help="a run, as for ls (default: latest)")
    parser.add_argument("--step", type=int, metavar="N", help="the step in detail (default: slow and captured ones)")
    parser.add_argument("--against", metavar="RUN|N|RUN:N", help="hold it against a run, a step, or another run's step")
    text = f"(default: {REPORT} in the run's folder; with --step and --against a name with these in it)"
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help=text)
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - for standard output")
    parser.add_argument("--md", metavar="FILE", help="write Markdown; - for standard output")
    parser.set_defaults(run=lambda parsed: _run(parsed, parent(parsed)))
    return parser


def _run(parsed: argparse.Namespace, parent: Path) -> int:
    # The other commands need none of it.
    from autoprof.report import making

    return making.run(parsed, parent)
