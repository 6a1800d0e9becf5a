"""Programs behave the same without autoprof and with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.differential.running import Program, captures, hooks_called, programs

PROGRAMS = programs()


def _marked(program: Program, *marks: pytest.MarkDecorator) -> object:
    if lacking := program.lacks():
        marks = (*marks, pytest.mark.skip(reason=f"{lacking} is not installed"))
    if "differs" in program.directives:
        marks = (*marks, pytest.mark.xfail(strict=True, reason=program.directive("differs")))
    if "sometimes" in program.directives:
        marks = (*marks, pytest.mark.xfail(strict=False, reason=program.directive("sometimes")))
    return pytest.param(program, id=program.name, marks=marks)


@pytest.mark.parametrize("program", [_marked(program) for program in PROGRAMS if not program.captures])
def test_a_program_behaves_the_same_with_hooks(
    program: Program, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if "slow" in program.directives:
        request.getfixturevalue("thorough")
    _assert_no_difference(program, tmp_path, recording=False)


@pytest.mark.parametrize("program", [_marked(program) for program in PROGRAMS if program.captures])
def test_a_program_behaves_the_same_with_captures(
    program: Program, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if "slow" in program.directives:
        request.getfixturevalue("thorough")
    _assert_no_difference(program, tmp_path, recording=True)
    assert captures(tmp_path / "runs"), "no step was captured"


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize("program", [_marked(each) for each in PROGRAMS if each.directive("captures") == ""])
def test_a_program_without_a_directive_behaves_the_same_with_captures(program: Program, tmp_path: Path) -> None:
    _assert_no_difference(program, tmp_path, recording=True)


def _assert_no_difference(program: Program, folder: Path, recording: bool) -> None:
    off = program.run(folder, False, recording)
    on = program.run(folder, True, recording)
    assert "IT HANGS" not in "".join(off.stderr)
    assert on.stderr == off.stderr
    assert on.stdout == off.stdout
    assert on.status == off.status
    assert on.files == off.files
    if program.directive("hooks") == "none":
        assert not hooks_called(folder / "runs")
    elif program.directive("hooks") != "unseen":
        assert hooks_called(folder / "runs"), "no hook was called"
