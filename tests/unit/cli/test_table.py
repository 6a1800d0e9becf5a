"""Tables at any width, and the environment's say on colours."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from autoprof.cli import console
from autoprof.cli.main import main
from tests.support.made_runs import make_run

HEADER = ["run", "started", "state", "finding"]
ROWS = [
    ["20261120-101010-aaaaaa", "2026-11-20 18:53:44", "ended", "the slowest sample held up all others, by 12 s"],
    ["20261120-111111-bbbbbb", "2026-11-20 18:53:44", "failed", "-"],
]


@pytest.mark.parametrize("columns", [200, 80, 60, 40])
def test_a_table_fits_and_breaks_no_name(columns: int) -> None:
    lines = list(console.table_lines(HEADER, ROWS, columns, drop=("started",)))
    assert max(map(len, lines)) <= columns
    for row in ROWS:
        assert any(line.startswith(row[0]) for line in lines)
    gone = [name for name in HEADER if name not in lines[0]]
    assert gone == {200: [], 80: [], 60: ["started"], 40: ["started", "finding"]}[columns]
    assert lines[-1] == f"a wider terminal shows: {', '.join(gone)}" or not gone


def test_text_wraps_at_words_before_a_column_goes() -> None:
    lines = list(console.table_lines(HEADER, ROWS, 95))
    assert [line[51:].strip() for line in lines] == [
        "finding",
        "the slowest sample held up all others, by",
        "12 s",
        "-",
    ]


def test_a_name_that_is_too_long_stays_whole() -> None:
    name = "actor.update_actor.rank0.node1.pid12345"
    lines = list(console.table_lines(["step", "capture", "state"], [["2", name, "complete"]], 20, drop=("step",)))
    assert lines == ["capture", name, "a wider terminal", "shows: step, state"]


def test_wide_characters_take_two_columns() -> None:
    lines = list(console.table_lines(["name", "state"], [["步骤", "ended"], ["a", "ended"]]))
    assert lines == ["name  state", "步骤  ended", "a     ended"]


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)
def test_colours_where_there_is_no_terminal(
    environment: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert console.uses_colours(io.StringIO()) is coloured
    assert console.columns(io.StringIO()) is None


def test_colours_change_no_character() -> None:
    plain = list(console.table_lines(HEADER, ROWS))
    coloured = list(console.table_lines(HEADER, ROWS, colours=True))
    assert "\x1b[31mfailed\x1b[0m" in coloured[2]
    bare = [line.replace("\x1b[0m", "") for line in coloured]
    for code in ("1", "31", "32"):
        bare = [line.replace(f"\x1b[{code}m", "") for line in bare]
    assert bare == plain


def test_ls_of_a_narrow_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, "20261120-101010-aaaaaa")
    monkeypatch.setattr(console, "columns", lambda stream: 40)
    assert main(["ls", "20261120-101010-aaaaaa", "--dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 40
    assert [line.split() for line in lines[:2]] == [["run", "state", "steps"], ["20261120-101010-aaaaaa", "ended", "2"]]
    assert ["2", "actor.b.rank0.h.pid1", "failed"] in [line.split() for line in lines]
