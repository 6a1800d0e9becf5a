"""Several processes, and sharded models."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench.gpu.facts import SKIPPED, Fact, row
from bench.gpu.rows.basics import STEPS, chosen, complete, counted, kernels, states
from bench.gpu.workbench import Ran, Workbench


def _torchrun(bench: Workbench) -> Ran:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [*launcher, "bench.gpu.programs.loop", "--device", bench.device]
    settings = {"AUTOPROF": "1", "AUTOPROF_STEPS": STEPS, "AUTOPROF_RANKS": "all"}
    return bench.run(command, label="torchrun", environment=settings)


@row(120)
def two_processes(bench: Workbench) -> Iterator[Fact]:
    """Two ranks on one GPU under torchrun, their merged trace, and the report"""
    ran = _torchrun(bench)
    yield from complete(bench, ran, {2, 4})
    ranks = sorted({capture.meta["rank"] for capture in ran.captures("actor.update_actor")})
    yield bench.fact("both ranks are captured in one run", ranks == [0, 1], ranks)
    yield from kernels(bench, ran, "actor.update_actor")
    merged = bench.autoprof("merge", str(ran.run), "--step", "2", folder=ran.folder)
    yield bench.fact("autoprof merge makes one trace of them", merged["traces"] >= 2, f"{merged['traces']} traces")
    yield from _report(bench, ran)


def _report(bench: Workbench, ran: Ran) -> Iterator[Fact]:
    report = bench.autoprof("report", str(ran.run), folder=ran.folder)
    found = [capture for step in report["details"] for capture in step["captures"]]
    yield bench.fact("the report has every capture", len(found) == len(ran.captures()), len(found))
    devices = [device for capture in found for device in capture["devices"]]
    names = sorted({device["device"] for device in devices})
    yield bench.on_gpu("the report has the device's shares", devices, ", ".join(names))
    if bench.lacks("jinja2"):
        yield Fact("the page of the report is made", SKIPPED, "jinja2 is not installed")
        return
    page = ran.folder / "report.html"
    command = [sys.executable, "-m", "autoprof", "report", str(ran.run), "-o", str(page)]
    bench.run(command, label="page", folder=ran.folder)
    bench.keep(page, "report.html")
    yield bench.fact("the page of the report is made", page.stat().st_size, f"report.html, {page.stat().st_size} bytes")


@row(90, gpu=True, devices=2)
def nccl(bench: Workbench) -> Iterator[Fact]:
    """Two ranks on two GPUs: the kernels of NCCL, or RCCL, count as communication"""
    ran = _torchrun(bench)
    report = bench.autoprof("report", str(ran.run), folder=ran.folder)
    found = [capture for step in report["details"] for capture in step["captures"] if capture["stage"] == "reduce"]
    shares = [device["communication"] for capture in found for device in capture["devices"]]
    said = ", ".join(f"{share:.0%}" for share in shares)
    yield bench.on_gpu("the all-reduce is communication", shares and min(shares) > 0, said)


@row(60)
def fsdp(bench: Workbench) -> Iterator[Fact]:
    """FSDP2 recorded with shapes, while its parameters move between host and device"""
    yield from _sharded(bench, "moved", "--offload", "0")


@row(60, gpu=True)
def fsdp_offload(bench: Workbench) -> Iterator[Fact]:
    """FSDP2 recorded with shapes, with its parameters on the host"""
    yield from _sharded(bench, "offload", "--offload", "1")


def _sharded(bench: Workbench, label: str, *arguments: str) -> Iterator[Fact]:
    contents = "cpu,cuda,shapes" if bench.gpu else "cpu,shapes"
    on = bench.program("fsdp", *arguments, label=label, steps=STEPS, contents=contents)
    if on.said["absent"]:
        yield Fact("a sharded model is captured", SKIPPED, on.said["absent"])
        return
    yield chosen(bench, on, {2, 4})
    # torch refuses some moves of parameters during a recording; these end the capture.
    ends = {capture.meta["reason"] for capture in on.captures() if capture.meta["state"] == "truncated"}
    whole = set(states(on)) <= {"complete", "truncated"} and all("swaps a parameter" in reason for reason in ends)
    said = counted(states(on))
    yield bench.fact("every capture is complete, or ends where a parameter moves", whole, f"{said} {'; '.join(ends)}")
    shaped = [capture.trace.shaped() for capture in on.captures()]
    yield bench.fact("operators have shapes", all(shaped), sum(shaped))
    left_out = sorted({word for capture in on.captures() for word in capture.meta["left_out"]})
    yield bench.fact("nothing but moves of modules is left out", set(left_out) <= {"torch.module-moves"}, left_out)
    yield from kernels(bench, on)
    losses = on.said["losses"]
    yield bench.fact("the model learns", losses[-1] < losses[0], f"{losses[0]:.4f} to {losses[-1]:.4f}")
