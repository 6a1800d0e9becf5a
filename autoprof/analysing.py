"""`autoprof analyse`: has torch_npu analyse the recordings of a run that are not analysed yet."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from autoprof import _files, _finish, listing, rundir
from autoprof.listing import NotFound, Run
from autoprof.rundir import META, RunDir

_IMPORT = "import torch_npu.profiler.profiler"


class NoTorchNpu(Exception):
    """torch_npu can't be imported here. The message says why."""


def analyse(run: Run, number: int | None) -> Iterator[tuple[str, bool]]:
    """Analyse folders of a run, or of one of its steps, one after the other; gives each one's name and whether it is.

    Raises:
        NotFound: There are none.
        NoTorchNpu: It can't be done here.
    """
    steps = run.steps if number is None else [listing.step(run, number)]
    folders = [folder for step in steps for folder in _folders(RunDir(Path(run.path)).step(step.number))]
    if not folders:
        where = f"step {number} of {run.id}" if number is not None else run.id
        raise NotFound(f"{where} has no folders of torch_npu's (*{rundir.NPU_FOLDER}) that are complete")
    waiting = [folder for folder in folders if not _finish.analysed(str(folder))]
    if waiting:
        _check_torch_npu()
    _files.open_as(run.path)
    for folder in waiting:
        # What an analysis that was ended has left; torch_npu makes it anew from the raw data.
        _files.remove(str(folder / _finish.ANALYSED))
        done = _finish.analyse(str(folder), sys.executable, str(folder))
        if done:
            _note(folder)
        yield f"{folder.parent.name}/{folder.name}", done


def _folders(step: Path) -> list[Path]:
    return sorted(path for path in step.iterdir() if _finish.FOLDER.search(path.name) and path.is_dir())


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
    path = folder.with_name(_finish.FOLDER.sub("", folder.name) + META)
    if meta := listing.load_json(path):
        reason = "" if meta.get("reason") == _finish.NOT_ANALYSED else meta.get("reason")
        rundir.write_json(path, meta | {"reason": reason, "bytes": _finish.size(str(folder))})
