"""Stuck collectives, found in torch's flight records: ranks that did not join, or that called another collective.

A flight record is a pickle, and a pickle can run any code. So only lists, dicts, texts and numbers are loaded. Then the
sequence numbers of the collectives are compared between the ranks.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from autoprof.base import files, seam
from autoprof.report import places
from autoprof.report.hang_state import Process, Sentence, roles
from autoprof.report.model import name_ranks, plural
from autoprof.rundir.records import MAX_STACKS_BYTES, Frame

# Collectives that all ranks call with the same sizes.
_SAME_SIZES = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "_all_gather_base",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce",
)
# Maximum number of ended and of unfinished collectives that are kept of each process. The last ended and the first
# unfinished collectives are kept.
_MAX_ENDED, _MAX_OPEN = 64, 256
_MAX_FRAMES = 30
_MAX_TEXT_CHARS = 1000
# Maximum number of tensors of a collective, and of dimensions of a tensor.
_MAX_SIZES = 64
_MAX_GROUPS = 256
# Maximum length of the text that lists the ranks of a group. It is enough for some 10,000 ranks.
_MAX_RANKS_CHARS = 1 << 16


class Record(msgspec.Struct, frozen=True):
    """A flight record: the path of the file, the rank that wrote it, and the rank's world (see `Process.world`)."""

    path: str
    rank: int
    world: str


class Stuck(msgspec.Struct, frozen=True, kw_only=True):
    """A collective, send or recv in which some ranks wait for other ranks of the process group.

    Attributes:
        world: The world of the ranks (see `Process.world`).
        name: The name of the collective without the backend, such as `all_reduce`. For a send or recv, the call of the
            late rank, such as `send to rank 0`.
        number: The sequence number of the collective in the process group. None for a send or recv.
        group: The description of the process group. Without a description, the name of the process group.
        since_ns: The time of the first call by a waiting rank.
        waiting: The ranks that wait in the collective.
        late: The ranks that did not call the collective.
        unknown: The ranks without a flight record.
        silent: The ranks among them that did not answer the request for their stacks.
        other: Dict from each rank that called another collective to a text about the call.
        called: A text about the call of most ranks, if `other` is not empty. Else empty.
        frames: The stack of one call, innermost function last.
    """

    world: str
    name: str
    number: int | None
    group: str
    since_ns: int
    waiting: list[int]
    late: list[int]
    unknown: list[int]
    silent: list[int]
    other: dict[int, str]
    called: str
    frames: list[Frame]


class _Entry(msgspec.Struct, frozen=True):
    group: str
    description: str
    name: str
    collective_seq_id: int
    is_p2p: bool
    retired: bool
    time_created_ns: int
    input_sizes: list[list[int]]
    input_dtypes: list[str]
    frames: list[Frame]

    @property
    def title(self) -> str:
        """Return the name of the collective without the backend."""
        return self.name.rpartition(":")[2]

    def call(self, with_sizes: bool) -> str:
        """Return a text about the call. If `with_sizes` is True, it contains the sizes and types of the tensors."""
        sizes = ", ".join(map(str, self.input_sizes[:4]))
        return f"{self.title} of {sizes} {'/'.join(self.input_dtypes)}".strip() if with_sizes else self.title


class _Process(msgspec.Struct, frozen=True):
    rank: int
    world: str
    groups: dict[str, list[int]]
    last: dict[str, int]
    entries: list[_Entry]


# Exceptions that a damaged flight record can cause: when the file is read, when pickle's opcodes are executed, and when
# unexpected values are used.
_DAMAGED = (
    *(OSError, EOFError, pickle.PickleError, struct.error, msgspec.MsgspecError),
    *(ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError),
)


def stuck(records: Sequence[Record], silent: Collection[tuple[str, int | None]] = ()) -> tuple[list[Stuck], list[str]]:
    """Return the stuck collectives, and notes on flight records that can't be read. Never raise.

    A collective comes last if one of the late ranks waits in another stuck collective, which is the earlier cause.

    Args:
        records: The flight records.
        silent: World and rank of each process that did not answer the request for its stacks.
    """
    processes, notes = [], []
    for record in records:
        try:
            processes.append(_read(record))
        except _DAMAGED as error:
            seam.pass_on(error)
            notes.append(f"{Path(record.path).name}: {type(error).__name__}: {error}"[:300])
    return _stuck_collectives(_add_missing_groups(processes), silent), notes


def _refuse(unpickler: Any) -> None:
    raise pickle.UnpicklingError("it has more than lists, dicts, texts and numbers")


def _load_short_tuple(unpickler: Any, length: int) -> None:
    unpickler.stack[-length:] = [unpickler.stack[-length:]]


class _Unpickler(pickle._Unpickler):
    """An unpickler that loads only lists, dicts, texts and numbers. The needed memory is proportional to the file.

    The unpickler executes only the opcodes of such values. All other opcodes are refused: they create objects, call
    functions, or reserve as much memory as the file demands. The unpickler in C can't refuse opcodes, and reserves up
    to 32 GiB for one number. Tuples become lists: as the key of a dict, a nested tuple could take exponential time, or
    crash the process.
    """

    dispatch = dict.fromkeys(pickle._Unpickler.dispatch, _refuse)
    for _code in (
        *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
        *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
        *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
        *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
        *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
    ):
        dispatch[_code[0]] = pickle._Unpickler.dispatch[_code[0]]
    dispatch[pickle.EMPTY_TUPLE[0]] = pickle._Unpickler.dispatch[pickle.EMPTY_LIST[0]]
    dispatch[pickle.TUPLE[0]] = pickle._Unpickler.dispatch[pickle.LIST[0]]
    dispatch[pickle.TUPLE1[0]] = lambda self: _load_short_tuple(self, 1)
    dispatch[pickle.TUPLE2[0]] = lambda self: _load_short_tuple(self, 2)
    dispatch[pickle.TUPLE3[0]] = lambda self: _load_short_tuple(self, 3)


def _read(record: Record) -> _Process:
    """Read a flight record.

    Raises:
        OSError: The file can't be read, is too large, or is not a regular file.
        ValueError: The file is not a flight record.
        Exception: Any other error of pickle, which a damaged file can cause.
    """
    content = _Unpickler(io.BytesIO(files.read(record.path, MAX_STACKS_BYTES))).load()
    if not isinstance(content, dict):
        raise ValueError("not a flight record")
    entries = [
        entry
        for entry in _list(content.get("entries"))
        if isinstance(entry, dict) and len(_list(entry.get("process_group"))) == 2
    ]
    last_numbers: dict[str, int] = {}
    for entry in entries:
        if not entry.get("is_p2p"):
            group = _text(entry["process_group"][0])
            last_numbers[group] = max(last_numbers.get(group, -1), _number(entry.get("collective_seq_id")))
    # A hostile file may contain an entry thousands of times. So only the entries that are kept are converted.
    unfinished = [entry for entry in entries if not _is_retired(entry)][:_MAX_OPEN]
    ended = [entry for entry in entries if _is_retired(entry)][-_MAX_ENDED:]
    kept_entries = sorted([*ended, *unfinished], key=lambda entry: _number(entry.get("record_id")))
    names = {_text(entry["process_group"][0]) for entry in entries}
    return _Process(record.rank, record.world, _groups(content, names), last_numbers, [*map(_entry, kept_entries)])


def _is_retired(entry: dict[str, Any]) -> bool:
    # Older flight records lack `retired`. For them, use `state`.
    return entry["retired"] is True if "retired" in entry else entry.get("state") == "completed"


def _groups(content: dict[str, Any], names: set[str]) -> dict[str, list[int]]:
    """Return a dict from the name of each process group to its ranks. Omit groups that the record does not describe.

    Args:
        content: The content of the flight record.
        names: The names of the process groups.
    """
    ranks_of = {}
    configured = content.get("pg_config")
    for name, group in [*configured.items()][:_MAX_GROUPS] if isinstance(configured, dict) else ():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        ranks_of[_text(name)] = [int(word) for word in re.findall(r"\d{1,7}", _text(ranks, _MAX_RANKS_CHARS))]
    # In `pg_config`, gloo's groups have empty names (torch 2.13), so it contains only one of several groups of gloo.
    if "" in ranks_of and len(names - ranks_of.keys()) == 1:
        ranks_of[(names - ranks_of.keys()).pop()] = ranks_of[""]
    return {name: ranks_of[name] for name in names if name in ranks_of}


def _entry(entry: dict[str, Any]) -> _Entry:
    frames = [frame for frame in _list(entry.get("frames"))[:_MAX_FRAMES] if isinstance(frame, dict)]
    group, description = entry["process_group"]
    return _Entry(
        group=_text(group),
        description=_text(description),
        name=_text(entry.get("profiling_name")),
        collective_seq_id=_number(entry.get("collective_seq_id")),
        is_p2p=bool(entry.get("is_p2p")),
        retired=_is_retired(entry),
        time_created_ns=_number(entry.get("time_created_ns")),
        input_sizes=[
            [_number(size) for size in _list(sizes)[:_MAX_SIZES]]
            for sizes in _list(entry.get("input_sizes"))[:_MAX_SIZES]
        ],
        input_dtypes=[_text(kind) for kind in _list(entry.get("input_dtypes"))[:_MAX_SIZES]],
        frames=[
            Frame(_text(frame.get("name")), _text(frame.get("filename")), _number(frame.get("line")))
            for frame in frames
        ],
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any, max_chars: int = _MAX_TEXT_CHARS) -> str:
    return value[:max_chars].encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _number(value: Any) -> int:
    return value if isinstance(value, int) and abs(value) < 1 << 62 else 0


def _add_missing_groups(processes: Sequence[_Process]) -> list[_Process]:
    """Add missing process groups to each process, from the flight records of the other processes of the world.

    If no record of the world describes a group, all ranks that called a collective of the group become its ranks.
    """
    worlds: dict[str, dict[str, list[int]]] = {}
    callers: dict[tuple[str, str], set[int]] = {}
    for process in processes:
        for name, ranks in process.groups.items():
            worlds.setdefault(process.world, {}).setdefault(name, ranks)
        for entry in process.entries:
            callers.setdefault((process.world, entry.group), set()).add(process.rank)
    for (world, group), calling_ranks in callers.items():
        worlds.setdefault(world, {}).setdefault(group, sorted(calling_ranks))
    # Data-parallel groups share a name. So the same name may mean other ranks in another process, and the groups of the
    # process itself have priority.
    return [
        msgspec.structs.replace(
            process,
            groups={name: ranks for name, ranks in worlds.get(process.world, {}).items() if process.rank in ranks}
            | process.groups,
        )
        for process in processes
    ]


def _stuck_collectives(processes: Sequence[_Process], silent: Collection[tuple[str, int | None]] = ()) -> list[Stuck]:
    """Compare the calls of the ranks of each process group. Return the first stuck collective of each group.

    If no rank is late and a silent rank belongs to the group, return the last unfinished collective.
    """
    members_by_group: dict[tuple[str, str, tuple[int, ...]], dict[int, _Process]] = {}
    for process in processes:
        for group, ranks in process.groups.items():
            members_by_group.setdefault((process.world, group, tuple(ranks)), {})[process.rank] = process
    stuck_collectives = []
    for (world, group, group_ranks), members in members_by_group.items():
        calls: dict[int, dict[int, _Entry]] = {}
        for rank, process in members.items():
            for entry in process.entries:
                if entry.group == group and not entry.is_p2p:
                    calls.setdefault(entry.collective_seq_id, {})[rank] = entry
        # gloo marks a collective as ended late. So a collective that all ranks have joined does not count as stuck.
        candidates = [
            _stuck_call(world, group_ranks, group, members, number, calls[number], silent)
            for number in sorted(calls)
            if any(not entry.retired for entry in calls[number].values())
        ]
        first = next((each for each in candidates if each.late or each.other), None)
        if first is not None or (candidates and candidates[-1].silent):
            stuck_collectives.append(first or candidates[-1])
        stuck_collectives += _without_partner(world, group_ranks, group, members)
    waiting_ranks = {(each.world, rank) for each in stuck_collectives for rank in each.waiting}
    # A rank may be late because it waits in another group's collective. That collective comes first.
    return sorted(
        stuck_collectives,
        key=lambda each: (any((each.world, rank) in waiting_ranks for rank in each.late), each.since_ns),
    )


# The title of a send or recv: both ranks in the process group, its own first (`ProcessGroupNCCL::send` and `recv` in
# torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). The records of gloo have no sends.
_PEER_CALL = re.compile(r"(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})$")


def _without_partner(
    world: str, ranks: tuple[int, ...], group: str, members: Mapping[int, _Process]
) -> Iterator[Stuck]:
    """Yield the unfinished sends and receives of a process group that the other rank has not joined."""
    calls: dict[tuple[str, int, int], _Entry] = {}
    for process in members.values():
        for entry in process.entries:
            match = _PEER_CALL.match(entry.title)
            if entry.group == group and entry.is_p2p and not entry.retired and match is not None:
                calls.setdefault((match[1], int(match[2]), int(match[3])), entry)
    for (name, own, peer), entry in calls.items():
        missing = "recv" if name == "send" else "send"
        if (missing, peer, own) in calls or max(own, peer) >= len(ranks) or ranks[peer] not in members:
            continue
        yield Stuck(
            world=world,
            name=f"{missing} {'to' if missing == 'send' else 'from'} rank {ranks[own]}",
            number=None,
            group=entry.description or group,
            since_ns=entry.time_created_ns,
            waiting=[ranks[own]],
            late=[ranks[peer]],
            unknown=[],
            silent=[],
            other={},
            called="",
            frames=entry.frames[::-1],
        )


def _stuck_call(
    world: str,
    ranks: tuple[int, ...],
    group: str,
    members: Mapping[int, _Process],
    number: int,
    calls: dict[int, _Entry],
    silent: Collection[tuple[str, int | None]],
) -> Stuck:
    unknown = sorted(set(ranks) - members.keys())
    waiting = [rank for rank, entry in calls.items() if not entry.retired]
    late = [
        rank for rank in ranks if rank in members and rank not in calls and members[rank].last.get(group, -1) < number
    ]
    names = Counter(entry.title for entry in calls.values())
    name = names.most_common(1)[0][0]
    with_sizes = len(names) == 1 and name in _SAME_SIZES
    call_texts = {rank: entry.call(with_sizes) for rank, entry in calls.items()}
    most_common_call, count = Counter(call_texts.values()).most_common(1)[0]
    first_waiting = calls[waiting[0]]
    return Stuck(
        world=world,
        name=name,
        number=number,
        group=first_waiting.description or group,
        since_ns=min(calls[rank].time_created_ns for rank in waiting),
        waiting=sorted(waiting),
        late=sorted(late),
        unknown=unknown,
        silent=[rank for rank in unknown if (world, rank) in silent],
        other={rank: call for rank, call in sorted(call_texts.items()) if call != most_common_call}
        if count < len(call_texts)
        else {},
        called=most_common_call if count < len(call_texts) else "",
        frames=first_waiting.frames[::-1],
    )


def _present_places(rank: int, others: Sequence[int], process_of: Mapping[int | None, Process], role: str) -> str:
    """Return a text about the functions in which the two sides of different calls are: a rank, and the other ranks."""
    sides = [[rank], others]
    texts = []
    for side in sides:
        side_places = _places(side, process_of)
        if len(side_places) != 1:
            return ""
        who = name_ranks(side, role) if len(side) == 1 else "the others"
        texts.append(f"{who} {plural(side, 'is', 'are')} in {side_places.pop()}")
    if len({text.partition(" in ")[2] for text in texts}) == 1:
        return f"; all are in {texts[0].partition(' in ')[2]}"
    return f"; {', '.join(texts)}"


def _places(ranks: Sequence[int], process_of: Mapping[int | None, Process]) -> set[str]:
    """Return the functions in which ranks are."""
    return {of.place for each in ranks if (of := process_of.get(each)) is not None and of.place}


def _stage(ranks: Sequence[int], process_of: Mapping[int | None, Process]) -> str:
    """Return a text with the stage in which most of the ranks are. It is empty if none of them is in a stage."""
    stages = Counter(
        process.stage.name
        for rank in ranks
        if (process := process_of.get(rank)) is not None and process.stage is not None
    )
    return f" in {stages.most_common(1)[0][0]}" if stages else ""


def flight_records(processes: Sequence[Process]) -> list[Record]:
    """Return the flight records of the processes.

    If several processes of a world have the same rank, they can't be distinguished. Their records are left out.
    """
    ranks = Counter((process.world, process.joined_as) for process in processes if process.flight_record)
    return [
        Record(process.flight_record, process.joined_as, process.world)
        for process in processes
        if process.flight_record and process.joined_as is not None and ranks[process.world, process.joined_as] == 1
    ]


def collective(stuck: Stuck, processes: Sequence[Process]) -> Sentence:
    """Return a sentence about the ranks that did not join a collective, or that called another collective."""
    process_of: dict[int | None, Process] = {
        process.joined_as: process for process in processes if process.world == stuck.world
    }
    role = roles(processes).get(next(iter(process_of.values())).label, "") if process_of else ""
    call = stuck.name if stuck.number is None else f"{stuck.name} #{stuck.number}"
    group = f"process group {stuck.group}; autoprof compared the flight records"
    awaited = f"collective #{stuck.number}" if stuck.other else call
    waits = f"{plural(stuck.waiting, 'waits', 'wait')} {'for' if stuck.number is None else 'in'} {awaited}"
    evidence = [f"{name_ranks(stuck.waiting, role)} {waits}", group]
    caller = places.best_frame(stuck.frames)
    called_in = {places.text(caller)} if caller is not None else _places(stuck.waiting, process_of)
    if len(called_in) == 1:
        evidence[0] += f", called in {called_in.pop()}"
    if stuck.unknown:
        evidence.append(f"{name_ranks(stuck.unknown, role)} left no flight record")
    if stuck.late:
        late_processes = [process for rank in stuck.late if (process := process_of.get(rank)) is not None]
        late_places = list(dict.fromkeys(process.place for process in late_processes if process.place))
        here = f"; {plural(stuck.late, 'it is', 'they are')} in {late_places[0]}" if len(late_places) == 1 else ""
        if len(late_processes) == 1:
            here += f", in {late_processes[0].peer}" if late_processes[0].peer else ""
            here += late_processes[0].of_workers()
        joined = "called" if stuck.number is None else "joined"
        text = f"{name_ranks(stuck.late, role)} {plural(stuck.late, 'has', 'have')} not {joined} {call}"
        text += f"{_stage(stuck.waiting, process_of)}{here}"
        evidence += [line for process in late_processes[:1] for line in process.stack_lines()]
        return Sentence(text, evidence, next((process.file for process in late_processes), ""))
    other_calls = list(stuck.other.items())
    rank, first_call = other_calls[0]
    ranks = [each for each, other in other_calls if other == first_call]
    others = [each for each in stuck.waiting if each not in ranks]
    stage, other_stage = _stage(ranks, process_of), _stage(others, process_of)
    text = f"{name_ranks(ranks, role)} called {first_call} as #{stuck.number}{stage}"
    text += f", {name_ranks(others, role) if len(others) == 1 else 'the others'} {stuck.called}"
    text += other_stage if other_stage != stage else ""
    text += _present_places(ranks[0], others, process_of, role)
    other_texts = [f"{name_ranks([each], role)} called {other}" for each, other in other_calls if other != first_call]
    caller_process = process_of.get(rank)
    file = caller_process.file if caller_process is not None else ""
    return Sentence(text, [*other_texts[:5], *evidence], file)
