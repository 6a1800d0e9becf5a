"""The table by which verl's change #5025 was verified: windows, stages, merging, stacks, shapes, activities.

One factor has four levels (activities), six have two. Each pair of levels of two factors is in one of eight rows. The
ninth row has the defaults. The schedulers are made up, the profiler is real.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from autoprof.config.values import MERGE
from autoprof.run import end
from autoprof.run.runtime import Runtime
from autoprof.rundir import file_names
from autoprof.traces.merge_step import merge_replicas
from tests.support.sglang_schedulers import DECODES, Scheduler, passes, run, start, stop  # noqa: F401

ACTIVITIES = ((), ("cpu",), ("cuda",), ("cpu", "cuda"))
# By activities: whether the other level is taken in one of its rows; the other row takes the opposite.
FACTORS = {"start": "0001", "end": "0010", "stages": "0100", "merge": "0111", "stack": "0011", "shapes": "0101"}
ROWS = [
    (devices, {name for name, levels in FACTORS.items() if (levels[place] == "1") != opposite})
    for place, devices in enumerate(ACTIVITIES)
    for opposite in (False, True)
]
WORDS = {"stages": "profile-by-stage", "merge": MERGE, "stack": "stack", "shapes": "shapes"}


def test_each_pair_of_levels_has_a_row() -> None:
    for one in FACTORS:
        for devices in ACTIVITIES:
            assert {one in taken for asked, taken in ROWS if asked == devices} == {False, True}
        for other in set(FACTORS) - {one}:
            assert len({(one in taken, other in taken) for _, taken in ROWS}) == 4


@pytest.mark.parametrize(
    ("devices", "taken"), [*ROWS, ((), set())], ids=lambda level: "+".join(sorted(level)) or "default"
)
def test_each_row(run: Runtime, devices: tuple[str, ...], taken: set[str]) -> None:  # noqa: F811
    contents = (*devices, *(word for name, word in WORDS.items() if name in taken))
    first, last = "0" if "start" in taken else "", 1 if "end" in taken else 100
    for rank in (0, 1):
        scheduler = Scheduler(tp_rank=rank)
        assert start(scheduler, contents=contents, rollout_iterations=f"{first}:{last}") == ""
        passes(scheduler, "EXTEND", *DECODES)
        assert stop(scheduler) == ""
    end.wait_for_files(run)
    recorded = {"-EXTEND": 1, "-DECODE": min(7, last)} if "stages" in taken else {"": min(8, last)}
    for rank in (0, 1):
        for stage, count in recorded.items():
            meta, events = captured(run, f"TP-{rank}{stage}")
            assert (meta["state"], meta["contents"][0]) == ("complete", "cpu")
            assert meta["left_out"] == [word for word in devices if word == "cuda"]
            assert sum(event.get("name") == "work" for event in events) == count
            assert any(event.get("cat") == "python_function" for event in events) == ("stack" in taken)
            assert any("Input Dims" in event.get("args", {}) for event in events) == ("shapes" in taken)
    if "merge" in taken:
        merge_replicas(run.rundir.path)
        meta, events = captured(run, "merged")
        assert meta["state"] == "complete"
        assert sum(event.get("name") == "work" for event in events) == 2 * sum(recorded.values())


def captured(run: Runtime, part: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:  # noqa: F811
    """Return the meta file of a part of the replica, and the events of its trace."""
    (path,) = run.rundir.step(3).glob(f"rollout.replica2.{part}.*{file_names.META.removeprefix('.')}")
    trace = json.loads(gzip.decompress(Path(str(path).replace(file_names.META, file_names.TRACE)).read_bytes()))
    return json.loads(path.read_text()), trace["traceEvents"]
