"""The JSON schema of recipes, for editors, accepts the same files as a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_mock import MockerFixture

from autoprof.cli import recipes_check as check
from autoprof.cli.main import main
from autoprof.hooks import recipe
from autoprof.hooks.recipe import RecipeError
from tests.support.helpers import ROOT
from tests.support.recipe_texts import GOOD, OWN, near_hooks


def valid(document: Any) -> bool:
    return jsonschema.Draft7Validator(check.schema()).is_valid(document)


def test_the_schema_is_what_the_code_makes() -> None:
    shipped = ROOT / "recipes" / check.FILE
    assert shipped.read_text(encoding="utf-8") == check.schema_text(), (
        "run autoprof recipes --schema > recipes/recipe.schema.json"
    )


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--schema"]) == 0
    jsonschema.Draft7Validator.check_schema(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("path", [*OWN, *(ROOT / "examples").glob("*/*.toml")], ids=lambda path: path.stem)
def test_recipes_are_valid_by_the_schema(path: Path) -> None:
    jsonschema.validate(msgspec.toml.decode(path.read_bytes()), check.schema(), jsonschema.Draft7Validator)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("target =", "targe ="),
        ("name =", "title ="),
        ('"work"', '"a b"'),
        ('"stage"', '"stages"'),
        ('role = "actor"', "role = 3"),
        (', role = "actor"', ""),
        ('role = "actor"', 'role = "actor", colour = "red"'),
        ('role = "actor"', 'role = "actor", rank = "self rank"'),
        ('role = "actor"', 'role = "actor", when = { "3x" = "a" }'),
        ('behaviour = "stage"', 'behaviour = "step.end"'),
        ('behaviour = "stage"\noptions = { stage = "update_actor", role = "actor" }', 'behaviour = "stage"'),
        ('behaviour = "stage"\noptions = { stage = "update_actor", role = "actor" }', 'behaviour = "vllm.engine"'),
        ("[[hook]]", "[hook]"),
    ],
)
def test_the_schema_refuses_what_a_run_refuses(old: str, new: str, tmp_path: Path) -> None:
    path = tmp_path / "thing.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    assert valid(msgspec.toml.decode(GOOD))
    assert not valid(msgspec.toml.decode(path.read_bytes()))
    with pytest.raises(RecipeError):
        recipe.load(str(path))


@given(document=st.fixed_dictionaries({"target": st.just("thing"), "hook": st.lists(near_hooks, max_size=2)}))
def test_what_a_run_takes_is_valid_by_the_schema(
    document: dict[str, object], tmp_path: Path, mocker: MockerFixture
) -> None:
    path = tmp_path / "thing.toml"
    path.touch()
    mocker.patch("autoprof.hooks.recipe.msgspec.toml.decode", return_value=document)
    try:
        recipe.load(str(path))
    except RecipeError:
        return
    assert valid(document)


def test_every_key_is_described() -> None:
    content = check.schema()
    for definition in [content, *content["definitions"].values()]:
        for key, said in definition["properties"].items():
            assert said.get("description"), key
