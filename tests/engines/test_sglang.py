"""A real SGLang engine of each release, over two ranks, driven as a verl server drives it. Forward passes are
counted in the traces."""

from __future__ import annotations

import gzip
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines
import processes
import pytest
from helpers import clean_environment

HERE = Path(__file__).parent
SCRIPTS = HERE / "sglang_scripts"
RANKS = 2
# 8 tokens; with overlapped scheduling SGLang up to some release runs one pass more before it knows of the last.
WHOLE = (8, 9)
FINE = [{"problem": ""}, {"problem": ""}]


@dataclass(frozen=True)
class Driven:
    """What one engine said and left."""

    folder: Path
    said: dict[str, Any]

    def step(self, number: int) -> Path:
        return self.folder / "autoprof_runs" / "latest" / f"global_step_{number:06d}"

    def meta(self, number: int, part: str = "TP-0") -> dict[str, Any]:
        (path,) = self.step(number).glob(f"rollout.replica1.{part}.*.meta.json")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def events(self, number: int, part: str = "TP-0") -> list[dict[str, Any]]:
        (path,) = self.step(number).glob(f"rollout.replica1.{part}.*.pt.trace.json.gz")
        found: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        return found

    def passes(self, number: int, part: str = "TP-0") -> int:
        """Forward passes: each begins with the one embedding of the model."""
        return sum(event.get("name") == "aten::embedding" for event in self.events(number, part))


@pytest.fixture(scope="module", params=[name for name in engines.NAMES if name.startswith("sglang-")])
def driven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Driven:
    python = engines.python_of(request.param)
    folder = tmp_path_factory.mktemp("sglang")
    environment = clean_environment(
        PYTHONPATH=str(HERE / "sglang_cpu"),
        SGLANG_USE_CPU_ENGINE="1",
        TORCHDYNAMO_DISABLE="1",
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        # The cores of each rank; without it SGLang wants a NUMA node for each.
        SGLANG_CPU_OMP_THREADS_BIND=f"0|{min(1, (os.cpu_count() or 1) - 1)}",
    )
    model = folder / "model"
    made = processes.run([python, str(SCRIPTS / "model.py"), str(model)], cwd=folder, env=environment, timeout_s=120)
    assert made.status == 0, made.output[-4000:]
    # A failing engine ends its whole tree of processes, so it gets one of its own.
    finished = processes.run(
        [python, str(SCRIPTS / "engine.py"), str(model), str(RANKS)],
        cwd=folder,
        env=environment | {"AUTOPROF": "1", "AUTOPROF_RANKS": "all"},
        timeout_s=300,
    )
    assert finished.status == 0, finished.output[-4000:]
    (line,) = re.findall(r"^RESULT (.*)$", finished.output, re.MULTILINE)
    return Driven(folder, json.loads(line))


def test_each_capture_goes_to_its_steps_folder(driven: Driven) -> None:
    assert driven.said["whole"] == driven.said["first three"] == FINE
    assert driven.passes(1) in WHOLE
    assert driven.passes(2) == 3
    meta = driven.meta(1)
    assert (meta["state"], meta["rank"], meta["replica"], meta["step"]) == ("complete", 4, 1, 1)
    assert (meta["contents"], meta["left_out"]) == (["cpu"], [])
    (trace,) = driven.step(1).glob("*TP-0*.gz")
    assert meta["bytes"] == trace.stat().st_size


@pytest.mark.parametrize(
    ("name", "step", "passes"),
    [
        ("first three", 2, 3),
        ("middle", 3, 3),
        ("last one", 4, 1),
        ("two requests", 6, 3),
    ],
)
def test_windows_of_passes_are_exact(driven: Driven, name: str, step: int, passes: int) -> None:
    assert driven.said[name] == FINE
    assert driven.passes(step) == passes
    assert driven.meta(step)["left_out"] == []


def test_a_window_may_end_after_the_work(driven: Driven) -> None:
    assert driven.said["over the end"] == FINE
    assert driven.passes(5) == driven.passes(1) - 5
    assert driven.meta(5)["state"] == "complete"


def test_what_cannot_be_armed_begins_at_once_and_says_so(driven: Driven) -> None:
    assert driven.said["at once"] == FINE
    assert driven.passes(20) in (3, 4)
    assert driven.meta(20)["left_out"] == ["rollout-iterations"]


def test_every_rank_records_the_same_passes(driven: Driven) -> None:
    for step in (1, 2, 3, 4, 5, 6, 7, 9, 10, 14, 16, 18):
        assert driven.passes(step, "TP-1") == driven.passes(step, "TP-0")
    assert driven.passes(8, "TP-1-DECODE") == 3
    assert (driven.meta(1, "TP-0")["rank"], driven.meta(1, "TP-1")["rank"]) == (4, 5)


def test_the_first_pass_of_a_window_is_the_one_asked_for(driven: Driven) -> None:
    # The pass that takes the prompt in is longer than those that decode: 0:3 has it, 2:5 has not.
    assert len(driven.events(2)) > len(driven.events(3)) > 2 * len(driven.events(4))


def test_stacks_and_shapes_are_on_when_asked_for_and_off_otherwise(driven: Driven) -> None:
    def has(step: int) -> tuple[bool, bool]:
        events = driven.events(step)
        stacks = any(event.get("cat") == "python_function" for event in events)
        return stacks, any("Input Dims" in event.get("args", {}) for event in events)

    assert has(7) == (True, True)
    assert has(1) == has(2) == (False, False)
    assert driven.meta(7)["contents"] == ["cpu", "stack", "shapes"]


def test_stages_are_files_of_their_own(driven: Driven) -> None:
    assert driven.said["stages"] == FINE
    # The prompt is taken in by one pass; SGLang counts the passes of each stage.
    assert (driven.passes(8, "TP-0-EXTEND"), driven.passes(8, "TP-0-DECODE")) == (1, 3)
    assert driven.meta(8, "TP-0-DECODE")["contents"] == ["cpu", "profile-by-stage"]


def test_stages_without_an_end_are_left_out(driven: Driven) -> None:
    assert driven.said["stages without an end"] == FINE
    assert driven.passes(9) in WHOLE
    assert driven.meta(9)["left_out"] == ["profile-by-stage"]


def test_contents_that_this_build_lacks_are_left_out(driven: Driven) -> None:
    assert driven.said["unknown contents"] == FINE
    meta = driven.meta(10)
    assert (driven.passes(10), meta["state"], meta["contents"]) == (3, "complete", ["cpu", "merge-profiles"])
    assert meta["left_out"] == ["cuda", "npu", "memory", "flops", "module"]


def test_sglang_merges_where_it_is_asked_by_name(driven: Driven) -> None:
    assert driven.said["merged"] == FINE
    assert driven.meta(21)["contents"] == ["cpu", "sglang-merge-profiles"]
    ranks = [driven.events(21, f"TP-{rank}") for rank in range(RANKS)]
    assert len(driven.events(21, "sglang-merged")) == sum(map(len, ranks))
    assert driven.meta(21, "sglang-merged")["state"] == "complete"


@pytest.mark.parametrize(("name", "step"), [("never reached", 11), ("no work", 12), ("no work, stages", 13)])
def test_what_was_armed_and_not_reached_is_failed_and_never_fires(driven: Driven, name: str, step: int) -> None:
    started, stopped = driven.said[name]
    assert started == {"problem": ""}
    assert "no forward pass of the window ran" in stopped["problem"]
    # The passes that followed were more than enough to fire it.
    (left,) = driven.step(step).iterdir()
    meta = json.loads(left.read_text())
    assert (meta["state"], meta["reason"]) == ("failed", stopped["problem"])


def test_a_second_start_and_a_second_stop_are_refused(driven: Driven) -> None:
    again, idle = {"problem": "it is recording already"}, {"problem": "it was not recording"}
    assert driven.said["twice"] == [{"problem": ""}, again, {"problem": ""}, idle]
    assert driven.said["stop without start"] == idle
    assert driven.passes(14) in WHOLE


def test_a_folder_that_cannot_be_written_is_refused(driven: Driven) -> None:
    started, stopped = driven.said["unwritable"]
    assert started["problem"].startswith("NotADirectoryError")
    assert stopped == {"problem": "it was not recording"}


def test_autoprof_yields_to_profiling_by_somebody_else(driven: Driven) -> None:
    idle = {"problem": "it was not recording"}
    assert driven.said["their start"] == [{"problem": ""}, "ok", "ok", idle]
    assert driven.meta(16)["state"] == "truncated"
    assert driven.meta(16)["reason"] == "somebody else started the engine's profiler"
    assert len(list((driven.folder / "theirs" / "a").glob("*.trace.json.gz"))) == RANKS
    # A stop of theirs does what it would do without autoprof.
    started, theirs, ours = driven.said["their stop"]
    assert (started, ours) == ({"problem": ""}, idle)
    assert theirs.startswith("RuntimeError: Profiling is not in progress")
    assert driven.meta(18)["reason"] == "somebody else stopped the engine's profiler"


def test_autoprof_does_not_start_in_profiling_by_somebody_else(driven: Driven) -> None:
    busy = {"problem": "RuntimeError: somebody else profiles the engine"}
    assert driven.said["start in theirs"] == busy
    assert driven.said["their armed"] == ["ok", busy]
    assert not driven.step(17).exists()
    assert not driven.step(19).exists()


def test_the_engine_generates_the_same_all_along(driven: Driven) -> None:
    before = driven.said["tokens before"]
    assert len(before) == 8
    for name, tokens in driven.said.items():
        if name.startswith("tokens ") and name != "tokens two requests":
            assert tokens == before, name
    assert driven.said["tokens two requests"] == [before[:2], before[:6]]


def test_nothing_is_left_half_written(driven: Driven) -> None:
    assert list(driven.folder.rglob("*.part")) == []
