"""`autoprof recipes`: lists recipes, and reports errors in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoprof.cli.main import main
from autoprof.hooks import recipe
from autoprof.hooks.behaviour import BEHAVIOURS
from tests.support.distributions import declare, install
from tests.support.helpers import ROOT
from tests.support.recipe_checks import write
from tests.support.recipe_texts import OWN

# List of recipes


def test_all_recipes_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, trainer: Path) -> None:
    monkeypatch.setenv("AUTOPROF_RECIPES", str(write(tmp_path, name="mytrainer.mine.toml", top='versions = ">=1,<2"')))
    install(tmp_path / "site", "other-recipes", declare("other_recipes"), "other")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert main(["recipes"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert set(rows) >= {"recipe", "verl.v1", "vllm", "sglang", "ray"}
    assert rows["mytrainer.mine"] == ["mytrainer.mine", "mytrainer", ">=1,<2", "1", "AUTOPROF_RECIPES", "-", "yes"]
    assert rows["other"][2:5] == ["all", "1", "other-recipes"]
    assert rows["other"][5:] == ["-", "not", "installed"]
    ray = msgspec.toml.decode((ROOT / "recipes" / "ray.toml").read_bytes())
    assert rows["ray"][1:5] == ["ray", ray["versions"], str(len(ray["hook"])), "autoprof"]


@pytest.mark.parametrize(
    ("version", "fits"), [("1.5", "yes"), ("2.0", "newer than its range"), ("0.9", "not in its range")]
)
def test_what_is_installed_fits_or_not(
    version: str, fits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, trainer: Path
) -> None:
    info = trainer.parent / f"my_trainer-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: my-trainer\nVersion: {version}\n")
    write(tmp_path, top='versions = ">=1,<2"\ndistributions = ["my-trainer"]')
    monkeypatch.setenv("AUTOPROF_RECIPES", str(tmp_path / "mytrainer.toml"))
    assert main(["recipes", "mytrainer", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["recipes"]
    assert (entry["installed"], entry["fits"]) == (version, fits)


def test_the_hooks_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "verl"]) == 0
    text = capsys.readouterr().out
    for hook in (hook for path in OWN if path.name.startswith("verl.") for hook in recipe.load(str(path))):
        assert f"{hook.hook.module}:{hook.hook.attribute}" in text
    assert 'unless="prompts.meta_info.validate"' in text
    assert 'rewrap="verl.utils.ray_utils.auto_await"' in text


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["recipes"]}
    hooks = recipe.load(str(ROOT / "recipes" / "vllm.toml"))
    assert [hook["name"] for hook in entries["vllm"]["hooks"]] == [hook.hook.name for hook in hooks]
    assert entries["vllm"]["origin"] == "autoprof"


def test_recipes_that_are_wrong_are_listed_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOPROF_RECIPES", str(write(tmp_path, behaviour="stages")))
    install(tmp_path / "site", "lost", declare("lost.inner"))
    install(tmp_path / "site", "empty", declare("empty"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert main(["recipes"]) == 1
    printed = capsys.readouterr()
    assert next(line for line in printed.out.splitlines() if line.startswith("mytrainer")).endswith("wrong")
    wrong, empty, lost = sorted(printed.err.splitlines(), key=lambda line: "entry point" in line)
    assert "there is no 'stages'" in wrong
    assert "names 'empty', but" in empty
    assert "contains no *.toml files" in empty
    assert "lost: entry point 'mine' of autoprof.recipes names 'lost.inner', but there is no such package" in lost


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["verk"], 1, "there is no recipe 'verk'; did you mean 'verl'?; the recipes are"),
        (["zzz"], 1, "there is no recipe 'zzz'; the recipes are"),
        (["verl", "--schema"], 2, "NAME can't be combined with"),
    ],
)
def test_wrong_use(arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", *arguments]) == status
    assert said in capsys.readouterr().err


def test_behaviours_are_listed_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--behaviours"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{name}: " in f"\n{text}" for name in BEHAVIOURS)
    assert "    stage (required): Name of the stage" in text
    assert "None" not in text.replace("None where", "")
    assert main(["recipes", "--behaviours", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["behaviours"]
    assert listed["stage"]["options"]["stage"]["required"]
    for name, content in listed.items():
        assert content["does"], name
        assert all(option["means"] for option in content["options"].values()), name
