"""What the meta files of a run say of its GPUs: traces without any of their work, and memory that ran out."""

from __future__ import annotations

from autoprof import listing, tables
from autoprof.documents import MetaDocument
from autoprof.listing import CaptureFile, Run
from autoprof.rundir import META, SNAPSHOT, RunDir


def devices(run: Run) -> tuple[list[str], list[str]]:
    """Notes and problems: traces that hold nothing of the GPU, though their process used one.

    Where other traces of the process do hold something, nothing was in the way: the stage made no use of it.
    """
    found = [(step, capture) for step in run.steps for capture in step.captures if "device_events" in capture.meta]
    seeing = {_process(capture) for _, capture in found if capture.meta["device_events"]}
    notes, problems = [], []
    for step, capture in found:
        if not capture.meta["device_events"]:
            where = f"step {step.number}, {capture.name}: nothing of the GPU is in it"
            if _process(capture) in seeing:
                notes.append(f"{where}, though other traces of the process have it: the GPU had nothing to do")
            else:
                problems.append(f"{where}: {capture.meta.get('device_reason', '')}")
    return notes, problems


def out_of_memory(directory: RunDir) -> list[str]:
    """What is in `oom/`."""
    notes = []
    for path in sorted(directory.oom.glob(f"*{META}")):
        meta = listing.load_json(path, MetaDocument)
        where = f"in step {meta['step']}, {meta.get('role', '')} {meta.get('stage', '')}, " if "step" in meta else ""
        asked, free = tables.size(meta.get("asked_bytes", 0)), tables.size(meta.get("free_bytes", 0))
        name = f"oom/{path.name.removesuffix(META)}{SNAPSHOT}"
        notes.append(f"{name}: CUDA ran out of memory {where}with {asked} asked for, {free} free")
    return notes


def _process(capture: CaptureFile) -> tuple[object, object]:
    return capture.meta.get("host"), capture.meta.get("pid")
