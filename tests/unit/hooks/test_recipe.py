from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pytest_mock import MockerFixture

from autoprof import _boot
from autoprof.behaviours.stages import Stage
from autoprof.hooks import recipe
from autoprof.hooks.recipe import BoundHook, RecipeError, exceeds, fits
from tests.support.recipe_texts import GOOD, keys, loose, near_hooks, values


def test_own_recipes_are_read_without_their_behaviours(python: Any) -> None:
    code = """
from autoprof import _boot
from autoprof.hooks import recipe
paths = [path for recipe_paths in _boot.recipe_files().values() for path in recipe_paths]
hooks = [hook for path in paths for hook in recipe.load(path, check_options=False)]
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("autoprof.")}
print(len(hooks) > 100, sorted(rooms & {"behaviours", "capture", "run", "windows"}))
print(type(next(hook for hook in hooks if hook.key == "ray/init").behaviour).__name__)
"""
    assert python(f"import sys\n{code}").stdout.split("\n") == ["True []", "Init", ""]


def own_recipes() -> list[list[list[BoundHook]]]:
    """Return the hooks of autoprof's own recipes, by target and file."""
    return [[recipe.load(path) for path in paths] for paths in _boot.recipe_files().values()]


def test_names_of_own_hooks_are_unique() -> None:
    for files in own_recipes():
        keys = [hook.key for hooks in files for hook in hooks]
        assert len(keys) == len(set(keys))


def test_files_of_one_target_agree_on_its_releases() -> None:
    for files in own_recipes():
        recipes = [hooks[0].recipe for hooks in files]
        assert len({tuple(one.distributions) for one in recipes}) == 1
        bounds = {part.version for one in recipes for part in SpecifierSet(one.versions) if part.operator == "<"}
        for bound in sorted(bounds, key=Version)[:-1]:
            # If a file's range ends before others, its hooks must not have a later end.
            ended = [hook for hooks in files for hook in hooks if exceeds(bound, hook.recipe.versions)]
            assert not [hook.key for hook in ended if fits(bound, hook.hook.versions)]


def test_a_good_recipe(tmp_path: Path) -> None:
    path = tmp_path / "thing.mine.toml"
    path.write_text(GOOD)
    (hook,) = recipe.load(str(path))
    assert (hook.key, hook.file) == ("thing/work", "thing.mine")
    assert isinstance(hook.behaviour, Stage)
    assert hook.behaviour.stage == "update_actor"
    assert hook.hook.module == "thing.work"


def test_without_a_module_a_hook_is_on_the_target_itself(tmp_path: Path) -> None:
    path = tmp_path / "thing.toml"
    path.write_text(GOOD.replace('module = "thing.work"\n', ""))
    (hook,) = recipe.load(str(path))
    assert hook.hook.module == "thing"


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("target =", "targe =", ["targe"]),
        ('target = "thing"', 'target = "other"', ["'other'", "other.toml"]),
        ("thing.work", "elsewhere.work", ["[[hook]] 'work'", "module", "elsewhere.work"]),
        ('"stage"', '"stages"', ["[[hook]] 'work'", "behaviour", "'stages'", "step.wrap"]),
        ('behaviour = "stage"', 'behaviour = "stage"\nversions = "new"', ["[[hook]] 'work'", "versions", "'new'"]),
        ("[[hook]]", "[hook]", ["hook", "array"]),
        ("target = ", "target = = ", ["TOML"]),
    ],
)
def test_an_error_names_file_table_and_key(old: str, new: str, parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "thing.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(RecipeError) as caught:
        recipe.load(str(path))
    for part in [str(path), *parts]:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def load_or_explain(path: Path) -> None:
    """Assert that a file has hooks, or errors of one line each."""
    try:
        recipe.load(str(path))
    except RecipeError as error:
        assert "\n" not in str(error)
        for *place, text in error.problems:
            assert text
            assert "\n" not in "".join([*place, text])


@given(content=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode(errors="replace")))
def test_no_file_gives_anything_but_hooks_or_errors(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "thing.toml"
    path.write_bytes(content)
    load_or_explain(path)


@given(place=st.integers(0, len(GOOD)), cut=st.integers(0, 12), put=st.text(max_size=6))
def test_no_typing_error_gives_a_traceback(place: int, cut: int, put: str, tmp_path: Path) -> None:
    path = tmp_path / "thing.toml"
    path.write_bytes((GOOD[:place] + put + GOOD[place + cut :]).encode(errors="replace"))
    load_or_explain(path)


@pytest.mark.parametrize(
    "text", ["[" * 10_000 + "]" * 10_000, "{a=" * 10_000 + "1" + "}" * 10_000, "1\n" + "#x\n" * 3_400_000]
)
def test_a_recipe_that_is_too_deep_or_too_large_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "thing.toml"
    path.write_text(f"target = {text}")
    with pytest.raises(RecipeError, match="it can't be read as TOML"):
        recipe.load(str(path))


def test_a_recipe_of_many_hooks_is_read(tmp_path: Path) -> None:
    path = tmp_path / "thing.toml"
    path.write_text(
        GOOD + "".join(GOOD.replace('target = "thing"', "").replace('"work"', f'"w{n}"') for n in range(999))
    )
    assert len(recipe.load(str(path))) == 1000


@given(
    document=st.dictionaries(st.sampled_from(keys), values, max_size=6)
    | st.fixed_dictionaries(
        {"target": st.just("thing"), "hook": st.lists(near_hooks, max_size=3)}, optional={"passive": loose}
    )
)
def test_no_document_gives_anything_but_hooks_or_errors(
    document: dict[str, object], tmp_path: Path, mocker: MockerFixture
) -> None:
    path = tmp_path / "thing.toml"
    path.touch()
    mocker.patch("autoprof.hooks.recipe.msgspec.toml.decode", return_value=document)
    load_or_explain(path)


@pytest.mark.parametrize(
    ("version", "versions", "expected"),
    [
        ("0.9.1", ">=0.9", True),
        ("0.7.0.dev0", ">=0.7.0", True),
        ("0.8.0.dev", ">=0.9", False),
        ("0.27.1+cpu", "==0.27.1", True),
        ("2.60.0", "", True),
        ("", ">=5", True),
        ("unknown", ">=5", True),
    ],
)
def test_fits_compares_the_release(version: str, versions: str, expected: bool) -> None:
    assert fits(version, versions) is expected


@pytest.mark.parametrize(
    ("version", "versions", "expected"),
    [
        ("0.28.0", ">=0.27,<0.28", True),
        ("0.40.0.dev3", ">=0.27,<0.28", True),
        ("0.27.1", ">=0.27,<0.28", False),
        ("0.26.0", ">=0.27,<0.28", False),
        ("0.12.0", ">=0.9,!=0.12.0,<0.28", False),
        ("0.8.1", "<=0.8.0", True),
        ("0.10", "~=0.9.1", True),
        ("0.9.0", "~=0.9.1", False),
        ("0.28.0", "==0.27.*", True),
        ("0.1", ">0.1", False),
        ("9", ">=0.1", False),
        ("9", "", False),
        ("", "<1", False),
        ("main", "<1", False),
    ],
)
def test_exceeds_is_beyond_the_end_of_a_range(version: str, versions: str, expected: bool) -> None:
    assert exceeds(version, versions) is expected
