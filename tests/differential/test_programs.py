"""Programs that know nothing of autoprof do the same without it and with it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from running import Program, captures, hooks_called, programs


def _parametrised(with_captures: bool) -> list[object]:
    chosen = [program for program in programs() if program.captures == with_captures]
    return [pytest.param(program, id=program.name, marks=_marks(program)) for program in chosen]


def _marks(program: Program) -> list[pytest.MarkDecorator]:
    lacking = [name for name in program.says["needs"] if importlib.util.find_spec(name) is None]
    marks = [pytest.mark.skip(reason=f"{', '.join(lacking)} is not installed")] if lacking else []
    if "slow" in program.says:
        marks.append(pytest.mark.usefixtures("thorough"))
    if "differs" in program.says:
        marks.append(pytest.mark.xfail(strict=True, reason=program.said("differs")))
    return marks


@pytest.mark.parametrize("program", _parametrised(with_captures=False))
def test_a_program_with_hooks(program: Program, tmp_path: Path) -> None:
    _differs_in_nothing(program, tmp_path)


@pytest.mark.parametrize("program", _parametrised(with_captures=True))
def test_a_program_with_captures(program: Program, tmp_path: Path) -> None:
    _differs_in_nothing(program, tmp_path)
    assert captures(tmp_path / "runs"), "nothing was captured"


def _differs_in_nothing(program: Program, folder: Path) -> None:
    off = program.run(folder, on=False)
    on = program.run(folder, on=True)
    assert "IT HANGS" not in "".join(off.stderr)
    assert on.stderr == off.stderr
    assert on.stdout == off.stdout
    assert on.status == off.status
    assert on.files == off.files
    if program.said("hooks") == "none":
        assert not hooks_called(folder / "runs")
    else:
        assert hooks_called(folder / "runs"), "no hook was called"
