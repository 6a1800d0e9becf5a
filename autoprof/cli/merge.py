"""`autoprof merge`: merges a step's traces into one."""

from __future__ import annotations

import argparse
from pathlib import Path

from autoprof.base import files
from autoprof.base.redact import plain
from autoprof.cli import arguments, console
from autoprof.cli.documents import Merged
from autoprof.rundir import runs
from autoprof.rundir.file_names import RUN
from autoprof.traces import merge_step
from autoprof.traces.reader import TraceError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", nargs="*", metavar="RUN", help="a run, as for ls (default: latest), or trace files")
    parser.add_argument("--step", type=int, metavar="N", help="the step; needed only if the run has several")
    arguments.add_loop(parser, "the loop of the step")
    parser.add_argument("--role", metavar="PATTERNS", default="*", help="roles, as for AUTOPROF_ROLES (default: all)")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="output file (default: in the step's folder)")
    parser.add_argument(
        "--clocks",
        choices=("measured", "as-set"),
        default="measured",
        help="clocks of several hosts: corrected by the run's measurements (default), or uncorrected",
    )
    arguments.add_dir(parser)
    arguments.add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    options = merge_step.MergeOptions(roles=parsed.role, output=parsed.output, clocks=parsed.clocks)
    paths = [Path(name) for name in parsed.name]
    try:
        if paths and (len(paths) > 1 or (paths[0].exists() and not (paths[0] / RUN).is_file())):
            work = merge_step.plan_file_merge(paths, options)
        else:
            chosen_run = runs.find(arguments.parent(parsed), parsed.name[0] if paths else "latest")
            work = merge_step.plan_step_merge(
                chosen_run, merge_step.chosen(chosen_run, parsed.step, parsed.loop), options
            )
        with console.bar("merging", work.bytes) as advance:
            lines = list(merge_step.do(work, advance))
        if parsed.json:
            output_path = str(work.output)
            document = Merged(
                file=output_path,
                bytes=files.size(output_path),
                step=work.step,
                traces=len(work.inputs),
                lines=[*map(plain, lines)],
            )
            console.print_json(document)
            return 0
        for line in lines:
            print(plain(line))
    except (TraceError, OSError) as error:
        return console.complain(f"merge: {error}", 1)
    return 0
