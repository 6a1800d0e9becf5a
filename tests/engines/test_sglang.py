"""Real SGLang engine of each release on two ranks, called as verl's server calls it.

Forward passes are counted in the traces. The scenarios include faults, and after each fault the same engine must still
generate the same tokens.
"""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import engines

SCRIPTS = Path(__file__).parent / "sglang_scripts"
RANKS = 2
# Passes for 8 tokens. With overlapped scheduling, older releases of SGLang run one more pass before they know that the
# last token is done.
WHOLE = (8, 9)
FINE = [{"problem": ""}, {"problem": ""}]


@dataclass(frozen=True)
class Driven:
    """Output and files of one engine."""

    folder: Path
    said: dict[str, Any]

    def step(self, number: int) -> Path:
        return self.folder / "autoprof_runs" / "latest" / f"global_step_{number:06d}"

    def meta(self, number: int, part: str = "TP-0") -> dict[str, Any]:
        (path,) = self.step(number).glob(f"rollout.replica1.{part}.*.meta.json")
        return json.loads(path.read_text())

    def events(self, number: int, part: str = "TP-0") -> list[dict[str, Any]]:
        (path,) = self.step(number).glob(f"rollout.replica1.{part}.*.pt.trace.json.gz")
        return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]

    def passes(self, number: int, part: str = "TP-0") -> int:
        """Return the number of forward passes; each begins with the model's only embedding."""
        return sum(event.get("name") == "aten::embedding" for event in self.events(number, part))


@pytest.fixture(scope="module", params=[name for name in engines.NAMES if name.startswith("sglang-")])
def driven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Driven:
    folder = tmp_path_factory.mktemp("sglang")
    engine = engines.Engine(request.param, folder, cores=f"0|{min(1, (os.cpu_count() or 1) - 1)}")
    # A failed engine ends its whole process tree, so it runs in its own tree.
    driven = engine.run(SCRIPTS / "engine.py", engine.model, str(RANKS), AUTOPROF="1", AUTOPROF_RANKS="all")
    return Driven(folder, driven.result)


def test_each_capture_is_in_its_steps_folder(driven: Driven) -> None:
    assert driven.said["whole"] == driven.said["first three"] == FINE
    assert driven.passes(1) in WHOLE
    assert driven.passes(2) == 3
    meta = driven.meta(1)
    assert (meta["state"], meta["rank"], meta["replica"], meta["step"]) == ("complete", 4, 1, 1)
    assert (meta["contents"], meta["left_out"]) == (["cpu"], [])
    (trace,) = driven.step(1).glob("*TP-0*.gz")
    assert meta["bytes"] == trace.stat().st_size


@pytest.mark.parametrize(
    ("name", "step", "passes"), [("first three", 2, 3), ("middle", 3, 3), ("last one", 4, 1), ("two requests", 6, 3)]
)
def test_windows_of_passes_are_exact(driven: Driven, name: str, step: int, passes: int) -> None:
    assert driven.said[name] == FINE
    assert driven.passes(step) == passes
    assert driven.meta(step)["left_out"] == []


def test_a_window_can_end_after_the_last_pass(driven: Driven) -> None:
    assert driven.said["over the end"] == FINE
    assert driven.passes(5) == driven.passes(1) - 5
    assert driven.meta(5)["state"] == "complete"


def test_every_rank_records_the_same_passes(driven: Driven) -> None:
    for step in (1, 2, 3, 4, 5, 6, 7, 10, 14, 19, 21, 23, 25):
        assert driven.passes(step, "TP-1") == driven.passes(step, "TP-0")
    assert driven.passes(8, "TP-1-DECODE") == 3
    assert (driven.meta(1, "TP-0")["rank"], driven.meta(1, "TP-1")["rank"]) == (4, 5)


def test_a_window_begins_with_the_requested_pass(driven: Driven) -> None:
    # The prefill pass is longer than decode passes. The window 0:3 has it, the window 2:5 does not.
    assert len(driven.events(2)) > len(driven.events(3)) > 2 * len(driven.events(4))


def test_stacks_and_shapes_are_recorded_only_if_requested(driven: Driven) -> None:
    def has(step: int) -> tuple[bool, bool]:
        events = driven.events(step)
        stacks = any(event.get("cat") == "python_function" for event in events)
        return stacks, any("Input Dims" in event.get("args", {}) for event in events)

    assert has(7) == (True, True)
    assert has(1) == has(2) == (False, False)
    assert driven.meta(7)["contents"] == ["cpu", "stack", "shapes"]


def test_each_stage_has_its_own_file(driven: Driven) -> None:
    assert driven.said["stages"] == FINE
    # One pass is the prefill; SGLang counts the passes of each stage separately.
    assert (driven.passes(8, "TP-0-EXTEND"), driven.passes(8, "TP-0-DECODE")) == (1, 3)
    assert driven.meta(8, "TP-0-DECODE")["contents"] == ["cpu", "profile-by-stage"]


def test_stages_can_be_recorded_without_an_end(driven: Driven) -> None:
    assert driven.said["stages without an end"] == FINE
    assert driven.passes(9, "TP-0-EXTEND") + driven.passes(9, "TP-0-DECODE") in WHOLE


def test_stages_of_several_requests_are_separated(driven: Driven) -> None:
    assert driven.said["several"] == FINE

    def passes(stage: str) -> tuple[int, int]:
        names = [event.get("name") for event in driven.events(20, f"TP-0-{stage}")]
        return names.count("run_batch EXTEND"), names.count("run_batch DECODE")

    assert passes("EXTEND")[0] > 0
    assert passes("EXTEND")[1] == 0
    # Prefill passes between decode passes are in the trace of the decode stage, but not counted.
    assert passes("DECODE")[0] > 0
    assert passes("DECODE")[1] == 6


def test_contents_that_this_build_lacks_are_left_out(driven: Driven) -> None:
    assert driven.said["unknown contents"] == FINE
    meta = driven.meta(10)
    assert (driven.passes(10), meta["state"]) == (3, "complete")
    assert meta["contents"] == ["cpu", "memory", "flops", "module"]
    assert meta["left_out"] == ["cuda", "npu"]


@pytest.mark.parametrize(
    ("name", "step", "reason"),
    [
        ("never reached", 11, "recording was to begin after 50"),
        ("no work", 12, "the engine ran 0 forward passes"),
        ("no work, stages", 13, "the engine ran 0 forward passes"),
    ],
)
def test_a_window_that_is_not_reached_has_failed_and_never_opens_later(
    driven: Driven, name: str, step: int, reason: str
) -> None:
    started, stopped = driven.said[name]
    assert started == {"problem": ""}
    assert reason in stopped["problem"]
    # Enough passes followed to open the window, if it had still been waiting.
    left = list(driven.step(step).iterdir())
    assert len(left) == RANKS
    metas = [json.loads(path.read_text()) for path in left]
    assert {(meta["state"], meta["reason"]) for meta in metas} == {("failed", stopped["problem"])}


def test_a_second_start_and_a_second_stop_are_refused(driven: Driven) -> None:
    again, idle = {"problem": "it is recording already"}, {"problem": "it was not recording"}
    assert driven.said["twice"] == [{"problem": ""}, again, {"problem": ""}, idle]
    assert driven.said["stop without start"] == idle
    assert driven.passes(14) in WHOLE


def test_a_folder_that_cannot_be_written_is_refused(driven: Driven) -> None:
    started, stopped = driven.said["unwritable"]
    assert started["problem"].startswith("FileExistsError")
    assert stopped == {"problem": "it was not recording"}


def test_a_full_disk_costs_only_the_trace(driven: Driven) -> None:
    assert driven.said["full disk"] == FINE
    metas = [json.loads(path.read_text()) for path in driven.step(16).glob("*.meta.json")]
    assert len(metas) == RANKS
    assert {meta["state"] for meta in metas} == {"failed"}
    assert list(driven.step(16).glob("*.gz")) == []
    # A real full disk, if a file system can be mounted. The other tests show that the engine still works.
    started, _, mounted = driven.said["small disk"]
    assert started == {"problem": ""}
    assert (list(driven.step(17).glob("*.gz")) == []) == mounted


def test_a_rank_that_is_not_requested_writes_nothing(driven: Driven) -> None:
    assert driven.said["second rank"] == FINE
    assert driven.meta(18, "TP-1")["rank"] == 5
    assert {path.name.split(".")[2] for path in driven.step(18).iterdir()} == {"TP-1"}


def test_stacks_of_an_engine_without_work_do_not_flood_the_trace(driven: Driven) -> None:
    assert driven.said["idle"] == FINE
    events = driven.events(19)
    assert sum(event.get("cat") == "python_function" for event in events) > 0
    # Two seconds without work make about 10,000 events in 0.5.8; without pauses, more than five million.
    assert len(events) < 500_000


def test_the_ranks_of_a_step_can_be_merged(driven: Driven, python: Any) -> None:
    run = driven.folder / "autoprof_runs" / "latest"
    assert "2 traces" in python(["-m", "autoprof", "merge", str(run), "--step", "1"]).stdout
    merged = json.loads(gzip.decompress((driven.step(1) / "merged.pt.trace.json.gz").read_bytes()))
    passes = [event for event in merged["traceEvents"] if event.get("name") == "aten::embedding"]
    assert len(passes) == driven.passes(1, "TP-0") + driven.passes(1, "TP-1")
    assert len({event["pid"] for event in passes}) == RANKS


def test_the_trace_has_the_pid_of_its_process(driven: Driven) -> None:
    pids = {driven.meta(1, part)["pid"] for part in ("TP-0", "TP-1")}
    assert len(pids) == RANKS
    assert {event["pid"] for event in driven.events(1) if event.get("name") == "aten::embedding"} < pids


def test_the_users_profile_ends_autoprofs_capture(driven: Driven) -> None:
    # The user's start succeeds, autoprof's stop does not stop the user's profile, and the user's stop succeeds.
    assert driven.said["their start"] == [{"problem": ""}, "ok", {"problem": ""}, "ok"]
    assert driven.meta(21)["state"] == "truncated"
    assert driven.meta(21)["reason"] == "another torch profiler was started in this process"
    assert len(list((driven.folder / "theirs" / "a").glob("*.trace.json.gz"))) == RANKS
    # The user's stop fails as it does without autoprof.
    started, theirs, ours = driven.said["their stop"]
    assert (started, ours) == ({"problem": ""}, {"problem": ""})
    assert theirs.startswith("RuntimeError: Profiling is not in progress")
    assert driven.meta(23)["state"] == "complete"
    assert driven.passes(23) in WHOLE


def test_autoprof_does_not_record_while_the_user_does(driven: Driven) -> None:
    started, stopped = driven.said["start in theirs"]
    assert "another torch profiler is on" in started["problem"]
    assert stopped == {"problem": "it was not recording"}
    assert not driven.step(22).exists()
    # The user's profile begins after autoprof's start and before its first pass.
    started, theirs, stopped = driven.said["theirs before the first pass"]
    assert (started, theirs) == ({"problem": ""}, "ok")
    assert driven.meta(24)["reason"] == stopped["problem"] != ""
    assert len(list((driven.folder / "theirs" / "b").glob("*.trace.json.gz"))) == RANKS
    # A user's profile that is to begin later does not prevent a capture.
    assert driven.said["their armed"] == ["ok"]
    assert driven.said["in their armed"] == FINE
    assert driven.passes(25) == 3


def test_the_engine_always_generates_the_same_tokens(driven: Driven) -> None:
    before = driven.said["tokens before"]
    assert len(before) == 8
    for name, tokens in driven.said.items():
        if name.startswith("tokens ") and name != "tokens two requests":
            assert tokens == before, name
    assert driven.said["tokens two requests"] == [before[:2], before[:6]]


def test_no_part_files_remain(driven: Driven) -> None:
    assert list(driven.folder.rglob("*.part")) == []
