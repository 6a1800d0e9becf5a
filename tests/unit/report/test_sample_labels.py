"""Labels, lanes and token counts of samples of the user's own recipes."""

from __future__ import annotations

from typing import Any

from autoprof.report.model import SampleFigures
from autoprof.report.samples import Samples
from autoprof.rundir.journal import Line


def span(kind: str, name: str, start: int, end: int, ids: dict[str, Any], **counts: int) -> Line:
    return Line(
        kind=kind,
        name=name,
        role="agent",
        rank=None,
        step=1,
        start_ns=start * 10**9,
        end_ns=end * 10**9,
        ids=ids,
        counts=counts,
    )


def figures(*spans: Line) -> SampleFigures:
    samples = Samples()
    for each in spans:
        samples.add(0, each)
    found = samples.figures(0, ["actor rank 0"], ["journal/a.jsonl"])
    assert found is not None
    return found


def test_a_sample_has_the_ids_and_the_role_of_its_recipe() -> None:
    one = span("sample", "conversation", 0, 5, {"question": 3, "try": 1, "agent": "coder"}, response_tokens=12)
    two = span("sample", "conversation", 0, 2, {"question": 4, "try": 0, "agent": "coder"})
    rows = figures(one, two).longest
    assert [(row.label, row.lane) for row in rows] == [
        ("question 3, try 1", "agent (actor rank 0)"),
        ("question 4, try 0", "agent (actor rank 0)"),
    ]
    assert [row.response_tokens for row in rows] == [12, None]


def test_a_sample_without_ids_has_the_name_of_its_span() -> None:
    assert [row.label for row in figures(span("sample", "conversation", 0, 5, {})).longest] == ["conversation"]


def test_turns_and_tools_belong_to_the_sample_with_their_ids() -> None:
    tool = span("tool", "search", 1, 4, {"question": 3, "call": 7})
    samples = [span("sample", "conversation", 0, 5, {"question": number}) for number in (3, 4)]
    parts = {row.label: [part.kind for part in row.parts] for row in figures(tool, *samples).longest}
    assert parts == {"question 3": ["tool", "waiting"], "question 4": ["waiting"]}
