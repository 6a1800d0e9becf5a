"""`autoprof analyse`: has torch_npu analyse the recordings of a run that are not analysed yet."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from autoprof.base import files
from autoprof.capture.finisher import job
from autoprof.cli import arguments, console
from autoprof.cli.console import complain
from autoprof.cli.documents import Analysed, Analyses
from autoprof.rundir import decoder, file_names, layout, runs
from autoprof.rundir.file_names import META, NPU_ANALYSED
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import CaptureMeta
from autoprof.rundir.runs import NotFound, Run

_IMPORT = "import torch_npu.profiler.profiler"


class NoTorchNpu(Exception):
    """torch_npu can't be imported here. The message says why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_run(parser)
    parser.add_argument("--step", type=int, metavar="N", help="a step (default: all)")
    arguments.add_dir(parser)
    arguments.add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    found = arguments.find_run(parsed)
    folders = []
    try:
        with console.reading("analysing") as progress:
            for name, done in _analyse(found, parsed.step, progress):
                folders.append(Analysed(name, done))
                if not parsed.json:
                    print(f"{name}: {'analysed' if done else 'torch_npu could not analyse it'}", flush=True)
    except (NoTorchNpu, OSError) as error:
        return complain(f"analyse: {error}", 1)
    if parsed.json:
        console.print_json(Analyses(run=found.id, folders=folders))
    elif not folders:
        print("all is analysed")
    return 0 if all(folder.analysed for folder in folders) else 1


def _analyse(run: Run, number: int | None, progress: console.Reading) -> Iterator[tuple[str, bool]]:
    """Analyse folders of a run, or of one of its steps, one after the other. Yield each one's name and its success.

    Raises:
        NotFound: There are none.
        NoTorchNpu: It can't be done here.
    """
    steps = run.steps if number is None else [runs.step(run, number)]
    folders = [folder for step in steps for folder in _folders(RunDir(Path(run.path)).step(step.number))]
    if not folders:
        where = f"step {number} of {run.id}" if number is not None else run.id
        raise NotFound(f"{where} has no folders of torch_npu's (*{file_names.NPU_FOLDER}) that are complete")
    waiting = [folder for folder in folders if not job.analysed(str(folder))]
    if waiting:
        _check_torch_npu()
    files.open_as(run.path)
    for count, folder in enumerate(waiting):
        progress(count, len(waiting), folder.name)
        # What an analysis that was ended has left; torch_npu makes it anew from the raw data.
        files.remove(str(folder / NPU_ANALYSED))
        done = job.analyse(str(folder), sys.executable, str(folder))
        if done:
            _note(folder)
        yield f"{folder.parent.name}/{folder.name}", done


def _folders(step: Path) -> list[Path]:
    return sorted(path for path in step.iterdir() if file_names.FOLDER.search(path.name) and path.is_dir())


def _check_torch_npu() -> None:
    tried = subprocess.run(
        [sys.executable, "-c", _IMPORT],
        env=os.environ | {"AUTOPROF": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        last = (tried.stderr.strip().splitlines() or [f"status {tried.returncode}"])[-1]
        raise NoTorchNpu(f"torch_npu can't be imported by {sys.executable}: {last}")


def _note(folder: Path) -> None:
    """Have the meta file say that the folder is analysed."""
    path = folder.with_name(file_names.FOLDER.sub("", folder.name) + META)
    if meta := decoder.fields(path, CaptureMeta):
        reason = decoder.record(meta, CaptureMeta).reason
        reason = "" if reason == file_names.NOT_ANALYSED else reason
        layout.write_json(path, meta | {"reason": reason, "bytes": files.size(str(folder))})
