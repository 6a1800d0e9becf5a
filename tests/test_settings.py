from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_mock import MockerFixture

from autoprof import settings
from autoprof.settings import Settings, SettingsError, load


def test_defaults(tmp_path: Path) -> None:
    read = load({}, tmp_path)
    assert read.steps == "+2"
    assert read.ranks == "0"
    assert read.dir == str(tmp_path / "autoprof_runs")


def test_the_environment_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    (tmp_path / "autoprof.toml").write_text('steps = "3"\nranks = [0, 8]\ncontents = ["cpu", "shapes"]\n')
    read = load({"AUTOPROF_STEPS": "7", "AUTOPROF_RANKS": " "}, tmp_path)
    assert (read.steps, read.ranks, read.contents) == ("7", "0,8", ("cpu", "shapes"))


def test_a_role_overrides(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('contents = "cpu"\n[role.rollout]\ncontents = ["cpu", "profile_by_stage"]\nranks = "all"\n')
    read = load({"AUTOPROF_CONFIG": str(file)}, tmp_path)
    assert read.for_role("rollout").contents == ("cpu", "profile-by-stage")
    assert read.for_role("rollout").ranks == "all"
    assert read.for_role("actor").contents == ("cpu",)


@pytest.mark.parametrize(
    ("roles", "taken"),
    [("*", {"actor", "ref", "rollout"}), ("!ref", {"actor", "rollout"}), ("*,!r*", {"actor"}), ("ref", {"ref"})],
)
def test_roles(roles: str, taken: set[str], tmp_path: Path) -> None:
    read = load({"AUTOPROF_ROLES": roles}, tmp_path)
    assert {role for role in ("actor", "ref", "rollout") if read.takes_role(role)} == taken


def test_disabled() -> None:
    read = Settings(disable=("vllm", "verl/update-*"))
    assert read.disabled("vllm", "worker")
    assert read.disabled("verl", "update-actor")
    assert not read.disabled("verl", "compute-log-prob")
    assert Settings(disable=("*",)).disabled("ray", "init")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STEPS", "5:2"),
        ("RANKS", "x"),
        ("TOOL", "perf"),
        ("MODE", "both"),
        ("CONTENTS", "cpu,everything"),
        ("ROLLOUT_ITERATIONS", "0:0"),
        ("MAX_TRACE_MB", "-1"),
        ("MAX_TRACE_MB", "nan"),
        ("STOP_TIMEOUT_S", "0"),
        ("LOG", "loud"),
        ("RECIPES", "/nowhere/recipes"),
        ("CONFIG", "/nowhere/autoprof.toml"),
        ("ROLES", ","),
    ],
)
def test_a_wrong_value_is_one_line_with_setting_value_and_what_it_takes(name: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load({f"AUTOPROF_{name}": value}, tmp_path)
    message = str(caught.value)
    assert message.startswith(f"AUTOPROF_{name}: ")
    assert value.split(",")[0] in message
    assert "it takes" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "text",
    [
        "steps = 'x'",
        "unknown = 1",
        "steps =",
        "role = 3",
        "[role.actor]\nsteps = '2'",
        "[role.actor]\nranks = true",
        "steps = {a = 1}",
        "steps = 2024-01-01",
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "autoprof.toml").write_text(text)
    with pytest.raises(SettingsError) as caught:
        load({}, tmp_path)
    assert str(tmp_path / "autoprof.toml") in str(caught.value)
    assert "\n" not in str(caught.value)


anything = st.one_of(
    st.text(max_size=30), st.text(alphabet="0123456789:,+!*allcpu-_. ", max_size=30), st.integers().map(str)
)


@given(st.dictionaries(st.sampled_from([name.upper() for name in settings._FIELDS]), anything))
def test_no_environment_gives_anything_but_settings_or_one_line(values: dict[str, str]) -> None:
    try:
        read = load({f"AUTOPROF_{name}": value for name, value in values.items()}, Path("/nonexistent"))
    except SettingsError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(read, Settings)


toml_values = st.recursive(
    st.one_of(st.text(max_size=10), st.integers(-5, 10**15), st.booleans(), st.floats(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)


@given(content=st.dictionaries(st.sampled_from([*settings._FIELDS, "role", "other"]), toml_values))
def test_no_file_gives_anything_but_settings_or_one_line(
    content: dict[str, object], tmp_path: Path, mocker: MockerFixture
) -> None:
    (tmp_path / "autoprof.toml").touch()
    mocker.patch("autoprof.settings.msgspec.toml.decode", return_value=dict(content))
    try:
        read = load({}, tmp_path)
    except SettingsError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(read, Settings)
