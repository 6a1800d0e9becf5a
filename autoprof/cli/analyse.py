"""`autoprof analyse`: runs torch_npu's analysis on those recordings of a run that are not analysed yet."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from autoprof.base import files
from autoprof.capture import finisher
from autoprof.cli import arguments, console
from autoprof.cli.console import complain
from autoprof.cli.documents import Analysed, Analyses
from autoprof.rundir import file_names, layout, runs
from autoprof.rundir.file_names import META, NPU_ANALYSED
from autoprof.rundir.records import CaptureMeta
from autoprof.rundir.runs import NotFound, Run

_IMPORT = "import torch_npu.profiler.profiler"


class NoTorchNpu(Exception):
    """torch_npu can't be imported here. The message gives the reason."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_run(parser)
    parser.add_argument("--step", type=int, metavar="N", help="a step (default: all)")
    arguments.add_dir(parser)
    arguments.add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    chosen_run = arguments.find_run(parsed)
    folders = []
    try:
        with console.reading("analysing") as progress:
            for name, succeeded in _analyse(chosen_run, parsed.step, progress):
                folders.append(Analysed(name, succeeded))
                if not parsed.json:
                    print(f"{name}: {'analysed' if succeeded else 'torch_npu could not analyse it'}", flush=True)
    except (NoTorchNpu, OSError) as error:
        return complain(f"analyse: {error}", 1)
    if parsed.json:
        console.print_json(Analyses(run=chosen_run.id, folders=folders))
    elif not folders:
        print("all recordings are analysed already")
    return 0 if all(folder.analysed for folder in folders) else 1


def _analyse(run: Run, number: int | None, progress: console.Reading) -> Iterator[tuple[str, bool]]:
    """Analyse torch_npu's folders one by one. Yield the name of each folder, and True if its analysis succeeded.

    If `number` is given, analyse only the folders of the step with this number. Otherwise, analyse all folders.

    Raises:
        NotFound: The run or the step does not exist, or has no complete folder of torch_npu.
        NoTorchNpu: This interpreter can't import torch_npu.
    """
    steps = run.steps if number is None else [runs.step(run, number)]
    folders = [folder for step in steps for folder in _folders(Path(step.folder))]
    if not folders:
        subject = f"step {number} of {run.id}" if number is not None else run.id
        raise NotFound(f"{subject} has no complete torch_npu folders (*{file_names.NPU_FOLDER})")
    unanalysed_folders = [folder for folder in folders if not finisher.is_analysed(str(folder))]
    if unanalysed_folders:
        _check_torch_npu()
    files.open_as(run.path)
    for count, folder in enumerate(unanalysed_folders):
        progress(count, len(unanalysed_folders), folder.name)
        # Remove the partial output of an interrupted analysis. torch_npu writes all of it again from the raw data.
        files.remove(str(folder / NPU_ANALYSED))
        succeeded = finisher.analyse(str(folder), sys.executable, str(folder))
        if succeeded:
            _record_analysis(folder)
        yield f"{folder.parent.name}/{folder.name}", succeeded


def _folders(step: Path) -> list[Path]:
    return sorted(path for path in step.iterdir() if file_names.FOLDER.search(path.name) and path.is_dir())


def _check_torch_npu() -> None:
    child = subprocess.run(
        [sys.executable, "-c", _IMPORT],
        env=os.environ | {"AUTOPROF": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        last_line = (child.stderr.strip().splitlines() or [f"status {child.returncode}"])[-1]
        raise NoTorchNpu(f"{sys.executable} can't import torch_npu: {last_line}")


def _record_analysis(folder: Path) -> None:
    """Update the meta file of the capture with this folder: clear the reason `not analysed`, and set the new size."""
    path = folder.with_name(file_names.FOLDER.sub("", folder.name) + META)
    if meta := layout.fields(path, CaptureMeta):
        reason = layout.record(meta, CaptureMeta).reason
        reason = "" if reason == file_names.NOT_ANALYSED else reason
        layout.write_json(path, meta | {"reason": reason, "bytes": files.size(str(folder))})
