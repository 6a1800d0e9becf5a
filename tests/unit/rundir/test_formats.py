"""Structs of the run directory's files and lines: their reference page, and writers that use plain dictionaries."""

from __future__ import annotations

import ast
import inspect
import json
import typing
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from msgspec import Struct

from autoprof.capture import finisher
from autoprof.capture.artifacts import Subject
from autoprof.capture.profilers import memory
from autoprof.cli import documents, recipes
from autoprof.rundir import journal, layout, records
from autoprof.rundir.records import CaptureMeta, Line, OutOfMemoryMeta, ProcessLine
from autoprof.rundir.runs import CaptureFile
from tests.support import formats

KINDS = formats.structs(records)


def test_the_page_is_what_the_structs_say() -> None:
    assert formats.PAGE.read_text() == formats.page(), "run make formats"
    assert formats.JSON_PAGE.read_text() == formats.json_page(), "run make formats"


@pytest.mark.parametrize("kind", [*KINDS, *formats.structs(documents), *formats.structs(recipes)])
def test_every_field_is_documented(kind: type[Struct]) -> None:
    documented = formats.comments(documents.Document) | formats.comments(kind)
    assert [name for name in kind.__struct_fields__ if not documented.get(name)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_struct_has_a_blank(kind: type[Struct]) -> None:
    assert isinstance(layout.record({}, kind), kind)


def test_a_merged_trace_may_be_asked_as_a_capture(tmp_path: Path) -> None:
    """Code that lists both kinds reads their reasons in the same way."""
    merged = {"state": "failed", "reason": "x", "left_out": {"a": "b"}, "clock": 5}
    (tmp_path / "merged.meta.json").write_text(json.dumps(merged))
    file = CaptureFile(str(tmp_path), "merged")
    assert (file.meta.reason, file.meta.left_out, file.merged.left_out) == ("x", [], {"a": "b"})


def test_lines_of_spans_are_distinguished_from_other_lines() -> None:
    process = ProcessLine(host="h", pid=1, clock=records.Moment(), version="0")
    assert journal.decoded(msgspec.json.encode(process)) == process
    tags = {kind.__struct_config__.tag for kind in typing.get_args(journal.AnyLine)}
    assert {str(tag)[:4].encode() for tag in tags} == journal.OTHER_KINDS
    assert {kind[:4].encode() for kind in records.SPAN_KINDS}.isdisjoint(journal.OTHER_KINDS)
    span = {"kind": "stage", "name": "x", "step": None, "role": "a", "rank": None, "start_ns": 1, "end_ns": 2}
    assert msgspec.to_builtins(journal.span_line(json.dumps(span).encode())) == span
    # A line of another release.
    assert journal.span_line(b'{"kind": "stage", "start_ns": 1}') == Line("stage", "", None, "", None, 1, 0)


@pytest.mark.parametrize("line", [b"", b"5", b"[1]", b"\xff", b'{"name": 5}', b'{"kind": null}', b"[" * 5000])
def test_a_damaged_line_is_no_line(line: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError, RecursionError)):
        journal.span_line(line)


def _keys(module: ModuleType, *functions: str) -> set[str]:
    """Return the keys of the dictionaries that functions of a module write."""
    trees = [ast.parse(inspect.getsource(getattr(module, name))) for name in functions]
    found = [each for tree in trees for each in ast.walk(tree) if isinstance(each, ast.Dict)]
    return {str(key.value) for each in found for key in each.keys if isinstance(key, ast.Constant)}


def test_the_finisher_writes_fields_of_meta_files() -> None:
    written = _keys(finisher, "_finish", "_compress", "_rename", "_name_folder", "take_report")
    assert written == {"state", "reason", "bytes", "device_events", "device_reason"}
    assert written <= set(CaptureMeta.__struct_fields__)


def test_a_snapshot_of_what_ran_out_of_memory_has_fields_of_its_meta_file() -> None:
    said = _keys(memory, "_attach", "_ran_out") - {"run"}
    assert {"asked_bytes", "unix_ns"} <= said <= set(OutOfMemoryMeta.__struct_fields__)
    assert set(Subject.__struct_fields__) <= set(OutOfMemoryMeta.__struct_fields__)
