"""Figures of the code: counts of lines and clauses, and reproducible counts of a stage."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

import pytest

from bench import figures

SOURCE = dedent('''\
    """A module
    of two lines."""

    import os  # where


    # A comment.
    class First(Exception):
        """A class."""

        text = """a text that is
        no docstring"""

        def work(self) -> None:
            "A method."
            try:
                os.stat("x")
            except (KeyError, Exception):
                pass
            except OSError:
                pass
            except:
                raise


    class Second:
        def work(self) -> None:
            try:
                pass
            except BaseException as error:
                raise error
    ''')


def test_comments_docstrings_and_blank_lines_do_not_count_as_code() -> None:
    assert figures.code_lines(SOURCE) == 19
    assert figures.code_lines('"""A module."""\n\n# Nothing.\n') == 0


def test_clauses_that_catch_everything_are_counted_in_tuples_too() -> None:
    assert figures.broad_clauses(ast.parse(SOURCE)) == 3


def test_blocks_that_catch_everything_are_counted() -> None:
    source = """
with seam.guard("a report", log.error_once), open("file"): pass
with seam.suppress(OSError, Exception): pass
with contextlib.suppress(OSError): pass
"""
    assert figures.broad_clauses(ast.parse(source)) == 2


def test_a_name_of_three_classes_counts_once() -> None:
    trees = [ast.parse(SOURCE), ast.parse("class First: pass"), ast.parse("class First: pass\nclass Third: pass")]
    assert figures.used_twice(trees) == 1


def test_figures_of_a_package_are_sums_over_its_modules(tmp_path: Path) -> None:
    for name in ("package", "tests"):
        (tmp_path / name / "inner").mkdir(parents=True)
        for module in ("one.py", "inner/two.py"):
            (tmp_path / name / module).write_text(SOURCE)
    found = figures.of_code(tmp_path / "package", tmp_path / "tests")
    assert found == {
        **{"modules": 2, "lines of code": 38, "lines of tests": 2 * len(SOURCE.splitlines())},
        **{"broad clauses": 6, "class names used twice": 2},
    }


def test_the_counts_of_a_stage_are_reproducible(tmp_path: Path) -> None:
    found = figures.of_stage(tmp_path / "first", captured=False)
    assert found == figures.of_stage(tmp_path / "second", captured=False)
    assert found["uncaptured stage: files"] < found["uncaptured stage: calls"]
    assert found["uncaptured stage: file operations"] > 0


@pytest.mark.needs("torch")
def test_a_captured_stage_makes_more_calls_than_an_uncaptured_one(tmp_path: Path) -> None:
    captured = figures.of_stage(tmp_path, captured=True)
    other = figures.of_stage(tmp_path, captured=False)
    for name, count in other.items():
        assert captured[name.replace("uncaptured", "captured")] > count


def test_processes_have_files_in_a_run(tmp_path: Path) -> None:
    assert all(count > 0 for count in figures.of_processes(tmp_path).values())


def test_every_figure_has_a_row() -> None:
    shown = figures.table(dict.fromkeys(figures.TARGETS, 1234))
    assert shown.count("1,234") == len(figures.TARGETS)
