"""Findings of collectives that do not end, by flight records."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autoprof.report import build
from autoprof.report.hangs import collectives
from autoprof.report.hangs.collectives import Record
from autoprof.rundir import runs
from tests.support.hung_runs import ALL_REDUCE, REWARD, HungRun, finding_of, flight_record, join, said

RANKS = Path(__file__).parents[2] / "support" / "late_ranks.py"


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Flight records of two real ranks of gloo: `missing` (one rank did not join) and `shape` (another size)."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = []
    for mode in ("missing", "shape"):
        (folder / mode).mkdir()
        for rank in ("0", "1"):
            environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "2000", "RANK": rank, "AUTOPROF": "0"}
            command = [sys.executable, str(RANKS), str(folder / mode), mode]
            ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
    for each in ranks:
        each.wait(300)
    return folder


def test_a_rank_that_did_not_join_a_collective_is_named_with_its_place(hung: HungRun, no_torch: None) -> None:
    for rank in range(4):
        late = rank == 3
        # A rank may not have noted yet that a collective has ended, though all ranks joined it.
        entries = [join(811, rank > 0)] + ([] if late else [join(812)])
        stage = "" if late else "update_actor"
        hung.stack(
            REWARD if late else ALL_REDUCE, rank=rank, role="actor", stage=stage, record=flight_record(entries, 4)
        )
    assert said(hung) == (
        "rank 3 of actor has not joined all_reduce #812 in update_actor; it is in reward.py:44 fetch_score"
    )
    assert "process group default_pg; autoprof compared the flight records" in finding_of(hung).evidence


def test_a_rank_with_another_shape_is_named_with_both(hung: HungRun, no_torch: None) -> None:
    for rank in range(3):
        entries = [join(4, True), join(5, size=8 if rank == 1 else 4)]
        hung.stack(ALL_REDUCE, rank=rank, role="actor", stage="update_actor", record=flight_record(entries, 3))
    assert said(hung) == (
        "rank 1 of actor called all_reduce of [8] Float as #5 in update_actor, the others all_reduce of [4] Float"
    )


def test_a_rank_with_another_collective_is_named_with_both(hung: HungRun, no_torch: None) -> None:
    for rank in range(3):
        entries = [join(5, name="nccl:broadcast" if rank == 1 else "nccl:all_reduce")]
        hung.stack(ALL_REDUCE, rank=rank, role="actor", stage="update_actor", record=flight_record(entries, 3))
    assert said(hung) == "rank 1 of actor called broadcast as #5 in update_actor, the others all_reduce"


def test_a_rank_that_is_late_because_it_waits_for_another_one_is_not_the_first_named(
    tmp_path: Path, no_torch: None
) -> None:
    def made(rank: int, groups: dict[str, list[int]], entries: list[tuple[str, int]]) -> Record:
        content = pickle.loads(flight_record([join(number) for _, number in entries]))
        for entry, (group, _) in zip(content["entries"], entries, strict=True):
            entry["process_group"] = (group, group)
        content["pg_config"] = {name: {"desc": name, "ranks": str(ranks)} for name, ranks in groups.items()}
        path = tmp_path / str(rank)
        path.write_bytes(pickle.dumps(content))
        return Record(str(path), rank, "w")

    pairs = {"a": [0, 1], "b": [1, 2]}
    records = [
        made(0, {"a": [0, 1]}, [("a", 1)]),
        made(1, pairs, [("b", 1)]),
        made(2, {"b": [1, 2]}, []),
    ]
    found, notes = collectives.stuck(records)
    assert [(each.group, each.late) for each in found] == [("b", [2]), ("a", [1])]
    assert notes == []


@pytest.mark.parametrize("shape", [False, True], ids=["missing", "shape"])
@pytest.mark.needs("torch")
def test_real_flight_records_of_two_ranks_tell_who_is_late(hung: HungRun, records: Path, shape: bool) -> None:
    folder = records / ("shape" if shape else "missing")
    for rank in range(2):
        late = rank == 1 and not shape
        content = (folder / f"record{rank}").read_bytes()
        stage = "" if late else "update_actor"
        hung.stack(REWARD if late else ALL_REDUCE, rank=rank, role="actor", stage=stage, record=content)
    finding = finding_of(hung)
    if shape:
        assert "called all_reduce of [8] Float as #4 in update_actor, rank 0 all_reduce of [4] Float" in finding.text
    else:
        rest = "has not joined all_reduce #4 in update_actor; it is in reward.py:44 fetch_score"
        assert finding.text.endswith(f"rank 1 of actor {rest}")
    assert "process group default_pg; torch compared the flight records" in finding.evidence


def test_a_record_that_would_run_code_does_not(hung: HungRun, tmp_path: Path, no_torch: None) -> None:
    proof = tmp_path / "ran"

    class Attack:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {proof}",)

    for rank, content in enumerate([pickle.dumps(Attack()), b"\x80\x04r\xff\xff\xff\x7f.", flight_record([join(5)])]):
        hung.stack(ALL_REDUCE, rank=rank, role="actor", stage="update_actor", record=content)
    figures = build.figures(runs.read(hung.folder))
    assert not proof.exists()
    assert [note for note in figures.notes if "it would create a posix.system" in note]
