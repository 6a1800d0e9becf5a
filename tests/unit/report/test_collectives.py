"""Findings of collectives that do not end, by flight records."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from autoprof.report import collectives
from autoprof.report.collectives import Record
from autoprof.rundir.records import MAX_STACKS_BYTES
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


def test_a_rank_that_did_not_join_a_collective_is_named_with_its_place(hung: HungRun) -> None:
    for rank in range(4):
        late = rank == 3
        # A rank may not have noted yet that a collective has ended, though all ranks joined it.
        entries = [join(811, rank > 0)] + ([] if late else [join(812)])
        stage = "" if late else "update_actor"
        hung.stack(
            REWARD if late else ALL_REDUCE, rank=rank, role="actor", stage=stage, record=flight_record(entries, 4)
        )
    assert said(hung) == (
        "actor rank 3 has not joined all_reduce #812 in update_actor; it is in reward.py:44 fetch_score"
    )
    assert "process group default_pg; autoprof compared the flight records" in finding_of(hung).evidence


def test_a_rank_with_another_shape_is_named_with_both(hung: HungRun) -> None:
    for rank in range(3):
        entries = [join(4, True), join(5, size=8 if rank == 1 else 4)]
        hung.stack(ALL_REDUCE, rank=rank, role="actor", stage="update_actor", record=flight_record(entries, 3))
    assert said(hung) == (
        "actor rank 1 called all_reduce of [8] Float as #5 in update_actor, the others all_reduce of [4] Float; "
        "all are in actor.py:300 update"
    )


def test_a_rank_with_another_collective_is_named_with_both(hung: HungRun) -> None:
    for rank in range(3):
        entries = [join(5, name="nccl:broadcast" if rank == 1 else "nccl:all_reduce")]
        hung.stack(ALL_REDUCE, rank=rank, role="actor", stage="update_actor", record=flight_record(entries, 3))
    assert (
        said(hung)
        == "actor rank 1 called broadcast as #5 in update_actor, the others all_reduce; all are in actor.py:300 update"
    )


def test_each_side_of_two_collectives_has_its_own_stage_and_one_name(hung: HungRun) -> None:
    for rank, stage in enumerate(["save_checkpoint", "update_actor"]):
        entries = [join(5, name="gloo:all_reduce" if rank == 1 else "gloo:all_gather")]
        hung.stack(ALL_REDUCE, rank=rank, role="actor", stage=stage, record=flight_record(entries, 2))
    assert said(hung) == (
        "actor rank 1 called all_reduce as #5 in update_actor, actor rank 0 all_gather in save_checkpoint; "
        "all are in actor.py:300 update"
    )


def test_a_rank_between_its_stages_has_the_same_name_as_in_its_stage(hung: HungRun) -> None:
    for rank, stage in enumerate(["update_actor", ""]):
        entries = [join(5, name="gloo:barrier" if rank == 1 else "gloo:all_reduce")]
        frames = REWARD if rank == 1 else ALL_REDUCE
        hung.stack(frames, rank=rank, role="actor", stage=stage, record=flight_record(entries, 2))
    assert said(hung) == (
        "actor rank 1 called barrier as #5, actor rank 0 all_reduce in update_actor; "
        "actor rank 1 is in reward.py:44 fetch_score, actor rank 0 is in actor.py:300 update"
    )
    assert finding_of(hung).evidence[0].startswith("actor ranks 0, 1 wait in collective #5")


def test_a_rank_that_does_not_send_is_named_with_the_rank_that_waits(hung: HungRun) -> None:
    # Ranks 0 and 1 exchange with each other, and rank 2 waits for rank 3.
    calls = ["nccl:send 0->1", "nccl:recv 1<-0", "nccl:recv 2<-3", ""]
    for rank, name in enumerate(calls):
        entries = [join(811, True), *([join(3, name=name)] if name else [])]
        where, stage = (ALL_REDUCE, "update_actor") if name else (REWARD, "")
        hung.stack(where, rank=rank, role="actor", stage=stage, record=flight_record(entries, 4))
    assert said(hung) == "actor rank 3 has not called send to rank 2 in update_actor; it is in reward.py:44 fetch_score"
    assert "actor rank 2 waits for send to rank 2, called in actor.py:7 update" in finding_of(hung).evidence


def test_the_evidence_has_name_call_and_place_of_the_rank_that_waits(hung: HungRun) -> None:
    hung.stack(ALL_REDUCE, rank=0, role="actor", stage="update_actor", record=flight_record([join(5)], 2))
    hung.stack(REWARD, rank=1, role="actor", record=flight_record([join(4, True)], 2))
    first = finding_of(hung).evidence[0]
    assert first.startswith("actor rank 0 waits in all_reduce #5, called in actor.py:")


def test_a_rank_that_is_late_because_it_waits_for_another_one_is_not_the_first_named(tmp_path: Path) -> None:
    def made(rank: int, groups: dict[str, list[int]], entries: list[tuple[str, int]]) -> Record:
        content = pickle.loads(flight_record([join(number) for _, number in entries]))
        for entry, (group, _) in zip(content["entries"], entries, strict=True):
            entry["process_group"] = (group, group)
        content["pg_config"] = {name: {"desc": name, "ranks": str(ranks)} for name, ranks in groups.items()}
        path = tmp_path / str(rank)
        path.write_bytes(pickle.dumps(content))
        return Record(str(path), rank, "w")

    pairs = {"a": [0, 1], "b": [1, 2]}
    records = [made(0, {"a": [0, 1]}, [("a", 1)]), made(1, pairs, [("b", 1)]), made(2, {"b": [1, 2]}, [])]
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
        calls = "called all_reduce of [8] Float as #4 in update_actor, actor rank 0 all_reduce of [4] Float"
        assert calls in finding.text
    else:
        rest = "has not joined all_reduce #4 in update_actor; it is in reward.py:44 fetch_score"
        assert finding.text.endswith(f"actor rank 1 {rest}")
    assert "process group default_pg; autoprof compared the flight records" in finding.evidence


def test_a_group_of_a_thousand_ranks_is_compared_whole(tmp_path: Path) -> None:
    for rank, entry in ((0, join(5)), (1023, join(4, True))):
        (tmp_path / str(rank)).write_bytes(flight_record([entry], ranks=1024))
    (stuck,), notes = collectives.stuck([Record(str(tmp_path / str(rank)), rank, "w") for rank in (0, 1023)])
    assert (stuck.waiting, stuck.late, stuck.unknown, notes) == ([0], [1023], list(range(1, 1023)), [])


def pickled(content: object, *opcodes: bytes) -> bytes:
    """Return a pickle of some content that goes on with some opcodes."""
    return pickle.dumps(content, protocol=2)[:-1] + b"".join(opcodes) + b"."


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


NOT_PLAIN = "UnpicklingError: it has more than lists, dicts, texts and numbers"
NO_RECORD = "ValueError: not a flight record"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (pickle.dumps(Attack()), NOT_PLAIN),
        (pickled({}, pickle.GLOBAL, b"os\nsystem\n"), NOT_PLAIN),
        (pickled({}, pickle.MARK, pickle.INST, b"os\nsystem\n"), NOT_PLAIN),
        (pickled("system", pickle.EMPTY_TUPLE, pickle.REDUCE), NOT_PLAIN),
        (pickled("system", pickle.EMPTY_TUPLE, pickle.NEWOBJ), NOT_PLAIN),
        (pickled({}, pickle.EMPTY_DICT, pickle.BUILD), NOT_PLAIN),
        (pickled("id", pickle.BINPERSID), NOT_PLAIN),
        (pickled({}, pickle.EXT1, b"\x01"), NOT_PLAIN),
        (pickled({}, pickle.DUP * 400_000), NOT_PLAIN),
        (pickled({}, pickle.BYTEARRAY8, (1 << 40).to_bytes(8, "little")), NOT_PLAIN),
        (pickled({}, pickle.LONG4, b"\xff\xff\xff\x7f"), NOT_PLAIN),
        (pickled({}, pickle.BINUNICODE, b"\xff\xff\xff\xff"), "EOFError: "),
        (pickled([], pickle.LONG_BINPUT, b"\xff\xff\xff\x7f"), NO_RECORD),
        (pickled([], pickle.EMPTY_LIST * 200_000, pickle.APPEND * 200_000), NO_RECORD),
        (pickled(5, pickle.TUPLE1 * 400_000), NO_RECORD),
        (pickled({}, pickle.NONE, pickle.TUPLE1 * 400_000, pickle.NONE, pickle.SETITEM), "TypeError: unhashable"),
        (pickled(5) + bytes(MAX_STACKS_BYTES), "OSError: "),
        (b"", "EOFError: "),
    ],
)
def test_a_hostile_record_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hostile").write_bytes(content)
    Path("waiting").write_bytes(flight_record([join(5)], ranks=3))
    Path("late").write_bytes(flight_record([join(4, True)], ranks=3))
    records = [Record(name, rank, "w") for rank, name in enumerate(("hostile", "waiting", "late"))]
    (stuck,), (note,) = collectives.stuck(records)
    assert (stuck.waiting, stuck.late, stuck.unknown) == ([1], [2], [0])
    assert note.startswith(f"hostile: {reason}")
    assert not Path("ran").exists()


def test_an_entry_that_is_repeated_by_reference_takes_little_memory(tmp_path: Path) -> None:
    entry = pickle.loads(flight_record([join(5)]))["entries"][0]
    entry["input_sizes"] = [[[1] * 64] * 64]
    record = tmp_path / "record"
    record.write_bytes(pickle.dumps({"entries": [entry] * 200_000}, protocol=2))
    tracemalloc.start()
    try:
        assert collectives.stuck([Record(str(record), 0, "w")]) == ([], [])
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
