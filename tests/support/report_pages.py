"""Invented figures of a run, of any size and with any names, for tests of the pages."""

from __future__ import annotations

import random

from autoprof.report import findings, overview
from autoprof.report.model import (
    CaptureFigures,
    Comparison,
    ComparisonRow,
    DeviceShares,
    Finding,
    Gap,
    Lane,
    Part,
    PathPart,
    RunFigures,
    SampleFigures,
    SampleRow,
    Skew,
    SkewRow,
    SpanRow,
    StageShare,
    StepFigures,
    StepRow,
    Tail,
    ToolRow,
)
from autoprof.traces.flame import FlameNode, FlameThread
from autoprof.traces.summary import EngineFigures, Operator, Phase

START_NS = 1795200000_000_000_000
STAGES = {"gen": 15.0, "reward": 0.4, "old_log_prob": 3.0, "ref": 3.1, "update_actor": 12.0, "update_weights": 2.0}
# Text that a browser could take for markup, and the page for the end of its JSON.
HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>%{x}<a href='//h'>&amp;\"'"


def figures(
    steps: int = 12, samples: int = 64, ranks: int = 8, named: str = "", compared: bool = False, details: int = 1
) -> RunFigures:
    """Return the figures of a run of `steps` steps, the last `details` of them in detail; `named` is in all names."""
    chance = random.Random(5)
    names = {f"{name}{named}": seconds for name, seconds in STAGES.items()}
    rows = [_row(number, names, chance) for number in range(1, steps + 1)]
    whole = sum(row.seconds for row in rows) or 1.0
    finding = Finding(
        kind="tail",
        text=f"Generation waited 11.2 s for 3 of {samples} samples, held by tool search{named}.",
        evidence=[f"prompt 9, rollout 2{named}: 26.1 s, the median 13.4 s", "tool search: 15 s, the median 0.8 s"],
        seconds=11.2,
        step=rows[-1].number if rows else None,
        file=f"journal/n1{named}-400.jsonl",
    )
    sums = [(name, sum(row.stages.get(name, 0) for row in rows)) for name in [*names, "other"]]
    return RunFigures(
        id=f"20261122-010203-abcdef{named}",
        path=f"/data/autoprof_runs/20261122-010203-abcdef{named}",
        command=f"python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {named}",
        state="ended",
        started_ns=START_NS,
        hosts=["n1", f"n2{named}"],
        versions={"verl": "0.9.1", f"ray{named}": "2.60.0"},
        steps=rows,
        stages=[
            StageShare(name=name, seconds=took, share=took / whole, steps=steps, median_s=took / max(steps, 1))
            for name, took in sums
        ],
        basis=overview.basis(rows) if rows else "",
        median_s=sorted(row.seconds for row in rows)[steps // 2] if rows else None,
        tokens_per_s=1320.0 if rows else None,
        findings=[finding] if rows else [],
        details=[_details(row, samples, ranks, named, finding, chance) for row in rows[len(rows) - details :]],
        comparison=_comparison(named) if compared else None,
        notes=[f"journal/n2{named}-7.jsonl: 1 line was cut off"],
        verdict="" if rows else findings.verdict([], False),
        autoprof="0.1.0",
    )


def _row(number: int, names: dict[str, float], chance: random.Random) -> StepRow:
    slow = number % 9 == 5
    stages = {name: seconds * chance.uniform(0.9, 1.1) * (2.5 if slow else 1) for name, seconds in names.items()}
    stages["other"] = 0.4
    seconds = sum(stages.values())
    return StepRow(
        number=number,
        start_ns=START_NS + number * 36_000_000_000,
        seconds=seconds,
        captured=number % 5000 == 5,
        slow=slow,
        usual_s=36.0,
        stages=stages,
        samples=64,
        prompt_tokens=90_000,
        response_tokens=48_000,
        tokens_per_s=48_000 / seconds,
    )


def _details(
    row: StepRow, samples: int, ranks: int, named: str, finding: Finding, chance: random.Random
) -> StepFigures:
    starts, at = {}, 0.0
    for name, took in row.stages.items():
        starts[name] = (at, at + took)
        at += took
    gen, *_ = starts.values()
    timers = [
        SpanRow(name=name, kind="timer", start_s=start, end_s=end)
        for name, (start, end) in starts.items()
        if name != "other"
    ]
    lanes = [_lane(f"trainer{named}", "trainer", timers, 100, row.seconds)]
    for rank in range(ranks):
        spans = [
            SpanRow(name=name, kind="stage", start_s=starts[name][0], end_s=starts[name][1] - rank * 0.01)
            for name in starts
            if name.startswith(("old_log_prob", "update"))
        ]
        lanes.append(_lane(f"actor rank {rank}{named}", "actor", spans, 200 + rank, row.seconds))
    ran = [
        SpanRow(name="tool_agent", kind="sample", start_s=gen[0], end_s=gen[1] * chance.uniform(0.3, 1))
        for _ in range(min(samples, 1000))
    ]
    lanes.append(_lane(f"agent_loop 0{named}", "agent_loop", ran, 400, row.seconds))
    return StepFigures(
        number=row.number,
        start_ns=row.start_ns,
        seconds=row.seconds,
        stages=row.stages,
        lanes=lanes,
        gaps=[Gap(start_s=gen[1], end_s=gen[1] + 3, after="a", before=f"b{named}", between="stages", within="other")],
        samples=_samples(samples, gen[1], named),
        skews=[_skew(ranks, named)],
        weight_sync_s=2.1,
        path=[PathPart(stage=name, start_s=start, end_s=end, held_by=named) for name, (start, end) in starts.items()],
        captures=[_capture(row.number, "actor", "update_actor", named), _engine(row.number, named)],
        findings=[finding],
    )


def _lane(label: str, role: str, spans: list[SpanRow], pid: int, whole: float) -> Lane:
    busy = sum(span.end_s - span.start_s for span in spans if span.kind != "sample")
    file = f"journal/n1-{pid}.jsonl"
    return Lane(
        label=label, role=role, host="n1", pid=pid, spans=spans, busy_s=busy, idle_s=max(0, whole - busy), file=file
    )


def _samples(count: int, end: float, named: str) -> SampleFigures:
    longest = []
    for place in range(min(count, 50)):
        tool = max(0.1, 15 - place * 2)
        parts = [
            ("turn", "generate", 11.0, 2),
            ("tool", f"search{named}", tool, 1),
            ("reward", "compute_score", 0.1, 1),
        ]
        longest.append(
            SampleRow(
                label=f"prompt {place}{named}, rollout 0",
                sample=f"{place}",
                rollout=0,
                agent="tool_agent",
                lane="agent_loop 0",
                file="journal/n1-400.jsonl",
                start_s=0,
                end_s=end - place * 0.1,
                seconds=sum(part[2] for part in parts),
                held_by=f"tool search{named}",
                parts=[Part(kind=kind, name=name, seconds=took, count=n) for kind, name, took, n in parts],
                spans=[],
                prompt_tokens=100,
                response_tokens=600,
            )
        )
    return SampleFigures(
        count=count,
        failed=1,
        start_s=0,
        end_s=end,
        mean_s=13.1,
        quantiles_s={"0": 9.0, "0.5": 13.4, "0.9": 15.0, "0.99": 24.0, "1": 26.1},
        done=[(end * place / 100, count * place // 100) for place in range(101)],
        parts=[],
        tools=[
            ToolRow(name=f"search{named}", calls=64, errors=1, seconds=66, median_s=0.8, max_s=15, slowest="prompt 0")
        ],
        longest=longest,
        tail=Tail(
            count=3, of=count, waited_s=11.2, samples=[row.label for row in longest[:3]], held_by=f"tool search{named}"
        ),
    )


def _skew(ranks: int, named: str) -> Skew:
    rows = [
        SkewRow(label=f"rank {rank}{named}", seconds=12 + rank % 7, calls=1, file="journal/n1-200.jsonl")
        for rank in range(min(ranks, 64))
    ]
    rows.sort(key=lambda row: -row.seconds)
    slowest = rows[0].label if rows else ""
    return Skew(
        stage=f"update_actor{named}",
        role="actor",
        of="rank",
        count=ranks,
        median_s=14,
        slowest=slowest,
        slowest_s=18,
        waited_s=4,
        rows=rows,
    )


def _operators(name: str, named: str, category: str, calls: int, most_us: tuple[float, float]) -> list[Operator]:
    """Return 30 operators. The first has `most_us`, its total and own time; the times fall from row to row."""
    total, own = most_us
    return [
        Operator(
            name=f"{name}{place}{named}",
            category=category,
            calls=calls,
            total_us=total / (place + 1),
            self_us=own / (place + 1),
        )
        for place in range(30)
    ]


def _capture(step: int, role: str, stage: str, named: str) -> CaptureFigures:
    operators = _operators("aten::op", named, "cpu_op", 50, (9e5, 8e5))
    kernels = _operators("sm90_gemm", named, "kernel", 9, (3e5, 3e5))
    return CaptureFigures(
        name=f"{role}.{stage}.rank0.n1.pid200",
        step=step,
        role=role,
        stage=f"{stage}{named}",
        file=f"global_step_{step:06d}/{role}.{stage}.rank0.n1{named}.pid200.pt.trace.json.gz",
        state="complete",
        tool="torch",
        bytes=12_300_000,
        rank=0,
        host="n1",
        pid=200,
        seconds=12.1,
        events=812_345,
        operators=operators,
        kernels=kernels,
        devices=[
            DeviceShares(
                device=f"GPU 0{named}", seconds=12.0, compute=0.72, communication=0.2, copy=0.03, idle=0.1, overlap=0.75
            )
        ],
        memory_peak_bytes=61_000_000_000,
        memory_total_bytes=80_000_000_000,
        bound="device",
        flame=[
            FlameThread(
                name="thread 200",
                us=9e5,
                nodes=[
                    FlameNode(parent=-1, name=f"{role}.{stage}{named}", category="user_annotation", us=9e5),
                    FlameNode(parent=0, name=f"aten::op0{named}", category="cpu_op", us=6e5),
                    FlameNode(parent=0, name="train.py(7): loss", category="python_function", us=2e5),
                    FlameNode(parent=2, name="aten::op1", category="cpu_op", us=1e5),
                ],
            )
        ],
    )


def _engine(step: int, named: str) -> CaptureFigures:
    return CaptureFigures(
        name="rollout.replica0.rank0.n1.pid300",
        step=step,
        role="rollout",
        stage="rollout",
        file=f"global_step_{step:06d}/rollout.replica0.rank0.n1.pid300.pt.trace.json.gz",
        state="truncated",
        tool="torch",
        bytes=2_300_000,
        replica=0,
        rank=0,
        seconds=9.0,
        engine=EngineFigures(
            engine=f"vLLM{named}",
            passes=100,
            prefill=Phase(passes=8, seconds=2.1, tokens=51_000),
            decode=Phase(passes=90, seconds=6.1, tokens=2_880),
            mixed=Phase(passes=2, seconds=0.5),
            other=Phase(passes=0, seconds=0.0),
        ),
        bound="cpu",
        reason=f"the window ended after 100 passes{named}",
    )


def _comparison(named: str) -> Comparison:
    rows = [
        ComparisonRow(kind="stage", name=f"gen{named}", unit="s", a=10.0, b=15.0, change=5.0, worse=True),
        ComparisonRow(kind="rate", name="tokens", unit="1/s", a=2000.0, b=1320.0, change=-680.0, worse=True),
        ComparisonRow(kind="stage", name="ref", unit="s", a=4.0, b=3.1, change=-0.9, worse=False),
        ComparisonRow(kind="stage", name="testing", unit="s", a=None, b=0.5, change=0.5, worse=True, where="step 5"),
    ]
    return Comparison(a=f"run a{named}", b="run b", rows=rows, findings=[])
