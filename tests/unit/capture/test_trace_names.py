"""Names in traces: torch does not escape them, so one with a quote makes the trace invalid JSON."""

from __future__ import annotations

import importlib
import io
import json
import py_compile
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from autoprof.capture import finisher, recorder
from tests.support.captures import SUBJECT, captured, finished, work


def written(content: bytes, piece: int = 1 << 20) -> bytes:
    file = io.BytesIO()
    with mock.patch.object(finisher, "_PIECE", piece):
        finisher.copy(io.BytesIO(content), file, len(content))
    return file.getvalue()


def kineto(name: bytes) -> bytes:
    """Return a trace as Kineto writes it, with an unescaped name."""
    event = b'  {\n    "ph": "X",\n    "name": "%b",\n    "args": {\n      "name": "thread 1 (%b)"\n    }\n  }' % (
        name,
        name,
    )
    stamp = b'      "autoprof": {"name": "a\\\\", "host": "b, \\"name\\": \\"c"},\n'
    return b'{\n%b  "traceEvents": [\n%b,\n%b\n  ],\n  "traceName": "x"\n}' % (stamp, event, event)


def test_names_with_quotes_are_in_the_trace_as_they_are(made: Any) -> None:
    names = ['say "hi"', '", "cat": "x', "layer(0): attn", "plain"]

    def named() -> None:
        for name in names:
            with torch.profiler.record_function(name):
                work()

    meta, trace = captured(made(), named)
    assert meta["state"] == "complete"
    assert {event["name"] for event in trace["traceEvents"]} >= set(names)


def test_modules_imported_in_a_stage_are_called_so(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps a pointer to the name of the code, and writes the bytes that are there later."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = [f"imported_in_a_stage_{number}" for number in range(20)]
    for module in modules:
        (tmp_path / f"{module}.py").write_text("def function(): ...\n")
        py_compile.compile(str(tmp_path / f"{module}.py"))  # what is read from there is freed
    run = made(contents=("cpu", "stack"))
    recording = recorder.begin(run, SUBJECT)
    for module in modules:
        importlib.import_module(module)
    taken = [f'"{number}",' * 3 for number in range(50_000)]
    recording.stop()
    del taken
    for module in modules:
        del sys.modules[module]
    ((_, trace),) = finished(run).values()
    found = [event["name"] for event in trace["traceEvents"] if re.search(r"imported_in_a_stage_\d", event["name"])]
    assert len(found) == len(modules)
    assert {re.sub(r".*: ", "", name) for name in found} == {"<module>"}


@given(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"])), st.integers(1, 200))
@example('"layer(0): attn"', 1000)
@example('"', 1)
@example('", "cat": "x', 7)
@example("a\\", 1000)
@example('ends with \\"', 1000)
@example("\x01\t\r", 1000)
def test_any_name_is_json_and_itself(name: str, piece: int) -> None:
    trace = json.loads(written(kineto(name.encode()), piece))
    try:  # A name that is written as JSON is taken as that.
        name = json.loads(f'"{name}"')
    except ValueError:
        pass
    assert [event["name"] for event in trace["traceEvents"]] == [name] * 2
    assert [event["args"]["name"] for event in trace["traceEvents"]] == [f"thread 1 ({name})"] * 2
    assert trace["autoprof"] == {"name": "a\\", "host": 'b, "name": "c'}


def test_what_is_no_utf_8_is_replaced() -> None:
    # Linux cuts the name of a thread after 15 bytes.
    trace = json.loads(written(kineto("ray::a学习学习".encode()[:14])))
    assert trace["traceEvents"][0]["name"] == "ray::a学习\N{REPLACEMENT CHARACTER}"


def test_plain_traces_are_not_touched() -> None:
    content = kineto(b"aten::mm")
    assert written(content, 5) == written(content) == content
