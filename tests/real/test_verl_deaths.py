"""Real runs of verl in which a process dies or fails in step 2, each for another cause.

They end as without autoprof, and `autoprof doctor` names the process, the stage and the line.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.run_table import FAULTS, ON, WHOLE
from tests.support.helpers import problems
from tests.support.verl_runs import VerlRun, verl_run

# Memory limit of the whole run. Without the fault, the worker needs 2 GB and the run 8 GB.
LIMIT_BYTES = 12 << 30
GROUPS = Path("/sys/fs/cgroup/memory")


def died(folder: Path, fault: str, **variables: str) -> VerlRun:
    """Make a run that ends by this fault."""
    return verl_run(folder, *WHOLE, packages=[FAULTS], status=1, FAULTS=fault, **variables, **ON)


def ended_as_without_autoprof(run: VerlRun, v1_off: VerlRun) -> None:
    """Assert that the step before is the same as without autoprof, and that autoprof itself has no errors."""
    assert run.metrics == {1: v1_off.metrics[1]}
    assert all(process["errors"] == {} for process in run.processes)
    assert run.info.state == "failed"
    assert run.info.died


@pytest.mark.fault("verl's trainer crashes", "ends as without autoprof", "nothing; doctor names the place")
def test_a_trainer_that_crashes_is_named(thorough: None, tmp_path: Path, v1_off: VerlRun) -> None:
    run = died(tmp_path, "crashes@2")
    ended_as_without_autoprof(run, v1_off)
    # The stack is unknown, because the library tvm-ffi, which vLLM installs, handles this signal itself.
    assert problems(run.directory)[0] == "the trainer crashed (SIGSEGV) in compute_advantage of step 2"


@pytest.mark.fault("a reward raises", "continues without the sample", "nothing; doctor names the place")
def test_a_reward_that_raises_is_named(thorough: None, tmp_path: Path) -> None:
    on, off = tmp_path / "on", tmp_path / "off"
    for folder in (on, off):
        folder.mkdir()
    without = verl_run(off, *WHOLE, packages=[FAULTS], FAULTS="raises@6")
    run = verl_run(on, *WHOLE, packages=[FAULTS], FAULTS="raises@6", **ON)
    assert run.metrics == without.metrics
    where = r"step 2: reward compute_score ended with ValueError: no score in inject_faults.py:\d+ score_or_fail"
    assert re.fullmatch(where, problems(run.directory)[0])


@pytest.fixture
def group() -> Iterator[Path]:
    """Make a control group with little memory, below this process's own group."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    place = GROUPS / own.get("memory", "").lstrip("/") / f"tests-{uuid.uuid4().hex[:8]}"
    try:
        place.mkdir()
        (place / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"needs the right to make a control group of version 1: {error}")
    yield place
    place.rmdir()


@pytest.mark.fault(
    "the kernel kills a worker for memory", "ends as without autoprof", "nothing; doctor names the worker"
)
def test_a_worker_that_the_kernel_killed_for_memory_is_named(
    thorough: None, tmp_path: Path, v1_off: VerlRun, group: Path
) -> None:
    run = died(tmp_path, "memory@2", MEMORY_GROUP=str(group))
    ended_as_without_autoprof(run, v1_off)
    killed = (
        r"actor rank 0 was killed by the kernel \(out of memory: 1[12]\.\d+ GB of 12\.\d+ GB used\) "
        "in update_actor of step 2"
    )
    assert re.search(killed, problems(run.directory)[0])
