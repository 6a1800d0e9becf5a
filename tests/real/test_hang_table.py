"""Programs with a planted hang or death: doctor names the cause, and the program ends as it does without autoprof."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.hang_table import ROWS
from tests.support import packages, planted_hangs
from tests.support.planted_hangs import Row


def _parameters(quick: bool) -> list[object]:
    return [
        pytest.param(row, id=row.name, marks=[pytest.mark.xfail(reason=row.fails, strict=True)] if row.fails else [])
        for row in ROWS
        if row.quick == quick
    ]


def _check(row: Row, folder: Path) -> None:
    if row.ranks > 1 or "torch" in row.code:
        packages.need("torch")
    done = planted_hangs.outcome(row, folder)
    assert done.on == done.off
    assert not done.missing, (done.problems, done.notes)


@pytest.mark.parametrize("row", _parameters(quick=True))
def test_doctor_names_the_cause(row: Row, tmp_path: Path) -> None:
    _check(row, tmp_path)


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize("row", _parameters(quick=False))
def test_doctor_names_the_cause_of_each_row(row: Row, tmp_path: Path) -> None:
    _check(row, tmp_path)
