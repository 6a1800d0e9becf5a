"""Reading of traces in pieces: the size of pieces makes no difference, and other files are rejected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprof.capture import finisher
from autoprof.traces import reader
from autoprof.traces.reader import Reader, TraceError
from tests.support.traces import dumped, kineto, process, save

decode = msgspec.json.Decoder(list[dict[str, Any]]).decode

# Names and arguments that look like the structure of a trace.
tricky = st.text(alphabet='{}[],:"\\ phé\n', max_size=12) | st.sampled_from(
    ['}, {"ph"', '"traceEvents": [', "]}", "ph"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | tricky,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(tricky, inner, max_size=3),
    max_leaves=6,
)
events = st.lists(
    st.fixed_dictionaries({"ph": st.just("X")}, optional={"name": tricky, "args": st.dictionaries(tricky, values)}),
    max_size=12,
)


def read(path: Path, size: int) -> tuple[list[Any], dict[str, Any]]:
    with Reader(path, size) as trace:
        found = [event for chunk in trace.chunks(decode) for event in chunk]
    return found, {name: json.loads(bytes(raw)) for name, raw in trace.fields.items()}


@given(events, st.integers(1, 400), st.sampled_from([kineto, dumped]))
def test_any_pieces_give_the_same_events(
    tmp_path: Path, written: list[Any], size: int, layout: Callable[[list[Any]], bytes]
) -> None:
    content = layout(written)
    path = save(tmp_path / "x.json", content)
    found, fields = read(path, size)
    assert found == written
    assert fields == json.loads(content) | {"traceEvents": []}


def test_lists_of_objects_among_the_arguments_do_not_end_an_event(tmp_path: Path) -> None:
    written = [{"ph": "X", "args": {"a": [{"b": 1}, {"c": 2}] * 20}}] * 50
    for layout in (kineto, dumped):
        assert read(save(tmp_path / "x.json.gz", layout(written)), 1000)[0] == written


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = save(tmp_path / "x.json.gz", kineto(process(7, "p", count=3000)))
    with Reader(path, 10_000) as trace:
        sizes = [len(chunk) for chunk in trace.chunks(decode)]
    assert sum(sizes) == 3000 * 3 + 6
    assert max(sizes) < 200


def test_a_trace_that_was_cut_to_size_is_whole(tmp_path: Path) -> None:
    raw = save(tmp_path / "x.json", kineto(process(7, "p", count=500), base_last=True))
    job = {"raw": str(raw), "trace": str(tmp_path / "x.gz"), "meta_path": str(tmp_path / "m"), "max_bytes": 20_000}
    finisher.finish(job | {"meta": {}})
    found, fields = read(tmp_path / "x.gz", 1000)
    assert 10 < len(found) < 500
    assert fields["baseTimeNanoseconds"]


WHOLE = kineto(process(7, "p"))
# Deeper than any decoder reads; the decoder of Python 3.13 reads more than 5,000 levels.
DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a Chrome trace"),
        (b"hello", "not a Chrome trace"),
        (b'{"traceEvents": 7}', "not a Chrome trace"),
        (b'[1, {"ph": "X"}]', "not a Chrome trace"),
        (b'{"a": "\\"traceEvents\\": [", "b": 1}', "not a Chrome trace"),
        (WHOLE[: len(WHOLE) // 2], "ends in the middle"),
        (WHOLE[: WHOLE.rindex(b"\n  ]")], "ends in the middle"),
        (WHOLE[: WHOLE.rindex(b"\n  ]") + 4], "the text after the events is not valid"),
        (WHOLE[:-3], "the text after the events is not valid"),
        (WHOLE.replace(b'"ph"', b"ph", 1), "can't be read"),
        (WHOLE.replace(b'"Ev Idx": 1', b'"Ev Idx": nan'), "can't be read"),
        (b'{"traceEvents": [1, 2]}', "can't be read"),
        (b'{"traceEvents": [{"ph": "X", "args": %b}]}' % DEEP, "nested lists or objects"),
        (b'{"a": %b, "traceEvents": []}' % DEEP, "not a Chrome trace"),
        (b'{"traceEvents": [{"ph": "X"}], "a": %b}' % DEEP, "the text after the events"),
    ],
)
def test_what_is_no_trace_is_said_to_be_none(tmp_path: Path, content: bytes, said: str) -> None:
    path = save(tmp_path / "bad.json", content)
    with pytest.raises(TraceError, match=said) as caught:
        read(path, 100)
    assert str(path) in str(caught.value)


def test_a_file_that_ends_early_or_is_not_there(tmp_path: Path) -> None:
    path = save(tmp_path / "x.json.gz", kineto(process(7, "p", count=500)))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(TraceError, match="can't be read to its end"):
        read(path, 1 << 20)
    with pytest.raises(TraceError, match="No such file"):
        Reader(tmp_path / "gone.json")


@given(st.binary(max_size=200))
def test_garbage_raises_nothing_else(tmp_path: Path, content: bytes) -> None:
    for whole in (content, b'{"traceEvents": [' + content, b"\x1f\x8b\x08" + content):
        path = save(tmp_path / "x.json", whole)
        try:
            read(path, 50)
        except TraceError as error:
            assert str(path) in str(error)


def test_an_event_without_an_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_LIMIT_BYTES", 10_000)
    path = save(tmp_path / "x.json", b'{"traceEvents": [{"ph": "X", "name": "' + b"x" * 50_000 + b'"}]}')
    with pytest.raises(TraceError, match="an event has more than"):
        read(path, 1000)
