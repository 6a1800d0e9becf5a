"""Recipes of other distributions: the process that starts a run finds them and passes them to its children."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from autoprof import _boot
from autoprof._boot import entry_points
from tests.support.distributions import declare, install
from tests.support.helpers import Python

# Program that prints the number of known recipes for `thing`, and True if it looked for entry points itself.
KNOWS = """
import sys, {imported}
from autoprof import _boot
print(len(_boot.recipe_files().get("thing", [])), "autoprof._boot.entry_points" in sys.modules)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    install(folder, "thing-recipes", declare("thing_recipes"), "thing")
    (folder / "plain.py").write_text("")
    (folder / "thing.py").write_text("def work():\n    return 3\n")
    return folder


def test_declared_folders_of_recipes_are_found(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    install(site, "inner", declare("inner.recipes.all"), package="inner/recipes/all")
    install(site, "colon", declare("colon:recipes"), package="colon/recipes")
    install(site, "plain-file", declare("plain"))
    install(site, "gone", declare("nowhere.at.all"))
    install(site, "other-group", declare("thing_recipes", group="autoprof.recipes.old"))
    (site / "unreadable-1.dist-info" / "entry_points.txt").mkdir(parents=True)
    (site / "broken-1.dist-info").mkdir()
    (site / "broken-1.dist-info" / "entry_points.txt").write_bytes(
        b"\xff[autoprof.recipes]\n[autoprof.recipes]\nx\n=\n"
    )
    found = {entry.distribution: entry.folder() for entry in entry_points.declared([str(site), "/nowhere"])}
    assert found == {
        "thing-recipes": str(site / "thing_recipes"),
        "inner": str(site / "inner" / "recipes" / "all"),
        "colon": str(site / "colon" / "recipes"),
        "plain-file": "",
        "gone": "",
        "broken": "",
    }


def test_the_first_import_of_an_installed_module_starts_the_search(python: Python, site: Path) -> None:
    assert python(KNOWS.format(imported="json"), AUTOPROF="1", PYTHONPATH=str(site)).stdout.split() == ["0", "False"]
    assert python(KNOWS.format(imported="plain"), AUTOPROF="1", PYTHONPATH=str(site)).stdout.split() == ["1", "True"]
    assert python(KNOWS.format(imported="plain"), PYTHONPATH=str(site)).stdout.split() == ["0", "False"]


def test_imports_during_interpreter_start_do_not_start_the_search(python: Python, site: Path) -> None:
    (site / "sitecustomize.py").write_text("import plain")
    code = "import sys; print('plain' in sys.modules, 'autoprof._boot.entry_points' in sys.modules)"
    assert python(code, AUTOPROF="1", PYTHONPATH=str(site)).stdout.split() == ["True", "False"]


@pytest.mark.parametrize("parent_imports", [True, False])
def test_children_search_only_if_their_parent_did_not(python: Python, site: Path, parent_imports: bool) -> None:
    code = f"""
import {"plain, " * parent_imports}subprocess, sys
sys.stdout.write(subprocess.check_output([sys.executable, "-c", {KNOWS.format(imported="plain")!r}], text=True))
"""
    assert python(code, AUTOPROF="1", PYTHONPATH=str(site)).stdout.split() == ["1", str(not parent_imports)]


@pytest.mark.parametrize(
    ("found", "result"),
    [
        # Variables that a worker on another node gets from the driver: another prefix, with folders that don't exist.
        ("/other/prefix:/other/prefix/recipes", ["1", "True"]),
        (f"{sys.prefix}:/nowhere:/gone.toml", ["0", "False"]),
    ],
    ids=["another prefix", "this prefix"],
)
def test_a_process_searches_its_own_site_packages_if_the_folders_are_of_another_prefix(
    python: Python, site: Path, found: str, result: list[str]
) -> None:
    passed = {"AUTOPROF": "1", "AUTOPROF_RUN_ID": "of-the-driver", _boot.FOUND: found}
    ended = python(KNOWS.format(imported="plain"), PYTHONPATH=str(site), **passed)
    assert (ended.stdout.split(), ended.stderr) == (result, "")


def test_a_path_that_a_script_adds_is_searched_too(python: Python, site: Path, tmp_path: Path) -> None:
    (tmp_path / "later" / "side").mkdir(parents=True)
    install(tmp_path / "later", "later-recipes", declare("later_recipes"), "late")
    code = f"""
import plain, sys
sys.path.insert(0, {str(tmp_path / "later")!r})
import side
from autoprof import _boot
print([name for name in ("thing", "late") if name in _boot.recipe_files()])
"""
    assert python(code, AUTOPROF="1", PYTHONPATH=str(site)).stdout.strip() == "['thing', 'late']"


def test_a_hook_of_a_distribution_is_applied(python: Python, site: Path, tmp_path: Path) -> None:
    python("import thing; assert thing.work() == 3", AUTOPROF="1", PYTHONPATH=str(site))
    (timeline,) = (tmp_path / "autoprof_runs").glob("2*/journal/*.jsonl")
    assert '"work"' in timeline.read_text()


def test_a_target_can_contain_its_own_recipe(python: Python, site: Path, tmp_path: Path) -> None:
    install(site, "self-made", declare("self_made.autoprof"), "self_made", package="self_made/autoprof")
    (site / "self_made" / "__init__.py").write_text("def work():\n    return 4\n")
    python("import self_made; assert self_made.work() == 4", AUTOPROF="1", PYTHONPATH=str(site))
    (timeline,) = (tmp_path / "autoprof_runs").glob("2*/journal/*.jsonl")
    assert '"work"' in timeline.read_text()


def test_a_failed_search_does_not_break_the_program(python: Python, site: Path) -> None:
    code = """
import os, sys
from autoprof import _boot
def fails(*arguments): raise RuntimeError("a disk is gone")
os.listdir = fails
import thing
print(thing.work(), os.environ["AUTOPROF"])
"""
    result = python(code, AUTOPROF="1", PYTHONPATH=str(site))
    assert result.stdout.split() == ["3", "1"]
    assert result.stderr == ("autoprof: could not look for recipes of distributions (RuntimeError: a disk is gone)\n")


def test_the_search_imports_only_its_own_module(python: Python, site: Path) -> None:
    code = "import sys; before = set(sys.modules); import plain; print(*(set(sys.modules) - before))"
    assert set(python(code, AUTOPROF="1", PYTHONPATH=str(site)).stdout.split()) == {
        "plain",
        "autoprof._boot.entry_points",
    }


def test_found_folders_are_ignored_under_another_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _boot.declared_folders() is None
    monkeypatch.setenv(_boot.FOUND, sys.prefix)
    assert _boot.declared_folders() == []
    monkeypatch.setenv(_boot.FOUND, os.pathsep.join([sys.prefix, "/a", "/b"]))
    assert _boot.declared_folders() == ["/a", "/b"]
    monkeypatch.setenv(_boot.FOUND, "/elsewhere:/a")
    assert _boot.declared_folders() is None
