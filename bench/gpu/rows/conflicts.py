"""Other tools that use the profilers' interfaces: CUPTI, Nsight Systems, DCGM."""

from __future__ import annotations

from collections.abc import Iterator

from bench.gpu.facts import Fact, Skipped, row
from bench.gpu.rows.basics import STEPS, complete, kernels
from bench.gpu.workbench import Workbench

_NO_CUPTI = "ROCm has no CUPTI: torch records with roctracer or rocprofiler"
# Samples while the following command runs.
_BESIDE_DCGM = 'dcgmi dmon -e 1002,1004 -d 200 >dcgm.log 2>&1 & D=$!; "$@"; S=$?; kill $D; exit $S'


@row(60, gpu=True, rocm=_NO_CUPTI)
def injection(bench: Workbench) -> Iterator[Fact]:
    """NVTX_INJECTION64_PATH names libcupti, as in some CUDA images"""
    fixed = {"NVTX_INJECTION64_PATH": "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so"}
    ran = bench.program("loop", environment=fixed, steps=STEPS)
    yield from complete(bench, ran, {2, 4})
    yield from kernels(bench, ran)


@row(60, gpu=True, rocm=_NO_CUPTI)
def cupti(bench: Workbench) -> Iterator[Fact]:
    """Other code subscribed to CUPTI first: the run continues, and the meta files report the missing events"""
    ran = bench.program("loop", "--holder", "1", steps=STEPS)
    if ran.said["held"].startswith("there is no"):
        raise Skipped(ran.said["held"])
    yield bench.fact("the holder has its subscription", ran.said["held"] == "held", ran.said["held"])
    yield from complete(bench, ran, {2, 4})
    for capture in ran.captures()[:1]:
        there = bool(capture.trace.kernels or capture.trace.copies)
        meta = capture.meta
        said = f"{len(capture.trace.kernels)} kernels; device_events {meta.get('device_events')}"
        yield bench.fact("the meta file agrees with the trace", meta.get("device_events") is there, said)
        reason = meta.get("device_reason", "")
        yield bench.fact("it gives a reason where there are no kernels", there or reason, reason or "there are kernels")


@row(90, programs=("nsys",), gpu=True, rocm="ROCm has no nsys")
def nsys(bench: Workbench) -> Iterator[Fact]:
    """Nsight Systems: a report for each captured stage"""
    front = ["nsys", "profile", "--capture-range=cudaProfilerApi", "--capture-range-end=repeat", "--kill=none"]
    front += ["--trace=cuda,nvtx", "--output=report", "--force-overwrite=true"]
    ran = bench.program("loop", front=front, tool="nsys", steps=STEPS)
    reports = sorted(ran.folder.glob("report*.nsys-rep"))
    sizes = [path.stat().st_size for path in reports]
    yield bench.fact("nsys wrote a report for each captured stage", len(reports) == 2 and min(sizes) > 1000, sizes)
    traces = list(ran.run.glob("global_step_*/*.pt.trace.json.gz"))
    yield bench.fact("torch.profiler recorded nothing there", not traces, len(traces))


@row(60, programs=("dcgmi",), gpu=True, rocm="ROCm has no DCGM")
def dcgm(bench: Workbench) -> Iterator[Fact]:
    """DCGM samples profiling counters at the same time"""
    ran = bench.program("loop", front=["sh", "-c", _BESIDE_DCGM, "sh"], steps=STEPS)
    log = (ran.folder / "dcgm.log").read_text(errors="replace").splitlines()
    yield bench.fact("DCGM sampled", len(log) > 2, log[-1].strip() if log else "it printed nothing")
    yield from complete(bench, ran, {2, 4})
    yield from kernels(bench, ran)
