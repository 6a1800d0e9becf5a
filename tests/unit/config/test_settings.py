import json
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_mock import MockerFixture

from autoprof.config import selection, settings
from autoprof.config.settings import Settings, load, unknown_roles
from autoprof.config.values import SettingsError
from tests.support.helpers import ROOT, Python


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


def test_roles_take_kinds_of_stages(tmp_path: Path) -> None:
    stages = [("actor", "update_actor"), ("actor", "log_prob"), ("rollout", "generate"), ("critic", "")]
    for roles, taken in (
        ("generate,critic", {("rollout", "generate"), ("critic", "")}),
        ("!log_prob", {("actor", "update_actor"), ("rollout", "generate"), ("critic", "")}),
        ("actor,!log_*", {("actor", "update_actor")}),
    ):
        read = load({"AUTOPROF_ROLES": roles}, tmp_path)
        assert {stage for stage in stages if read.takes_role(*stage)} == taken
    assert not load({"AUTOPROF_ROLES": "generate"}, tmp_path).takes_role("rollout")


def test_a_word_that_is_neither_a_role_nor_a_kind_is_named(tmp_path: Path) -> None:
    for roles in ("*", "!ref", "generate,actor", "update_*", "weight_sync"):
        assert unknown_roles(load({"AUTOPROF_ROLES": roles}, tmp_path)) == []
    (line,) = unknown_roles(load({"AUTOPROF_ROLES": "actor,!generat"}, tmp_path))
    assert line.startswith(
        "AUTOPROF_ROLES: 'generat' is neither a role of autoprof's recipes nor a kind of stage; "
        "did you mean 'generate'?; roles are trainer, "
    )
    file = tmp_path / "autoprof.toml"
    file.write_text('roles = "judge"\n[role.judge]\nranks = "all"\n')
    assert unknown_roles(load({}, tmp_path)) == []


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
        ("RANKS", "slowest:0"),
        ("WHEN", "step>2"),
        ("WHEN", "memory>2x"),
        ("WHEN", "oom>2x"),
        ("WHEN", "resume:0"),
        ("WHEN", "__import__('os')"),
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
        "steps = " + "[" * 10_000 + "]" * 10_000,
        "steps = " + "{a=" * 10_000 + "1" + "}" * 10_000,
        "[role.actor.ranks" + ".a" * 10_000 + "]",
        "[[when]]\n[when.ranks" + ".a" * 10_000 + "]",
        "# x\n" * 2_500_000,
    ],
    ids=lambda text: text[:20],
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


@given(st.dictionaries(st.sampled_from([name.upper() for name in settings.FIELDS]), anything))
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


@given(content=st.dictionaries(st.sampled_from([*settings.FIELDS, "role", "other"]), toml_values))
def test_no_file_gives_anything_but_settings_or_one_line(
    content: dict[str, object], tmp_path: Path, mocker: MockerFixture
) -> None:
    (tmp_path / "autoprof.toml").touch()
    mocker.patch("autoprof.config.settings.msgspec.toml.decode", return_value=dict(content))
    try:
        read = load({}, tmp_path)
    except SettingsError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(read, Settings)


def test_a_settings_file_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="/dev/zero: it can't be read as TOML"):
        load({"AUTOPROF_CONFIG": "/dev/zero"}, tmp_path)


def test_a_setting_is_read_where_the_file_is_too_deep(tmp_path: Path) -> None:
    (tmp_path / "autoprof.toml").write_text("steps = " + "[" * 10_000 + "]" * 10_000)
    assert settings.load_one("steps", {}, tmp_path) == Settings().steps


def test_conditions_in_a_text_and_in_tables_are_the_same(tmp_path: Path) -> None:
    text = "step>2x, update_actor>1.5x, rank>1.3x, replica>1.3x, memory>0.9, resume:2, oom, hang>10m, hang>5x, hang:off"
    read = load({"AUTOPROF_WHEN": text}, tmp_path)
    assert ", ".join(map(str, read.when)) == text
    (tmp_path / "autoprof.toml").write_text(f'when = "{text}"\n')
    assert load({}, tmp_path).when == read.when
    factors = {"step": 2, "update_actor": 1.5, "rank": 1.3, "replica": 1.3}
    tables = [f'[[when]]\nwhat = "{what}"\nfactor = {factor}\n' for what, factor in factors.items()]
    tables += [
        '[[when]]\nwhat = "memory"\nabove = 0.9\n',
        '[[when]]\nwhat = "resume"\nsteps = 2\n',
        "[[when]]\nwhat='oom'\n",
        "[[when]]\nwhat='hang'\nabove='10m'\n",
        "[[when]]\nwhat='hang'\nfactor=5\n",
        "[[when]]\nwhat='hang'\nabove='off'\n",
    ]
    (tmp_path / "autoprof.toml").write_text("".join(tables))
    assert load({}, tmp_path).when == read.when


def test_a_condition_has_a_window_of_its_own(tmp_path: Path) -> None:
    own = 'steps = 2\ncool-down = 0\nat-most = 1\ncontents = "cpu,stack"\nranks = "all"\n'
    (tmp_path / "autoprof.toml").write_text(f'[[when]]\nwhat = "step"\nfactor = 3\n{own}')
    (condition,) = load({}, tmp_path).when
    assert (condition.steps, condition.cool_down, condition.at_most) == (2, 0, 1)
    assert condition.overrides == {"contents": ("cpu", "stack"), "ranks": "all"}
    (other,) = load({"AUTOPROF_WHEN": "step>2x"}, tmp_path).when
    assert (other.steps, other.cool_down, other.at_most, other.overrides) == (1, 20, 3, {})


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("MIN_FREE_MB", "1e12", " (it must be below 1000000000000)"),
        ("MIN_FREE_MB", "1000000000000", " (it must be below 1000000000000)"),
        ("MIN_FREE_MB", "inf", " (it must be below 1000000000000)"),
        ("MAX_TRACE_MB", "1e3", " (write it in digits, such as 1024 or 0.5)"),
        ("STOP_TIMEOUT_S", "1_000", " (write it in digits, such as 1024 or 0.5)"),
        ("MAX_STEPS", "1.5", " (it must be a whole number)"),
        *(("MIN_FREE_MB", value, "") for value in ("0", "-1", "nan", "much")),
    ],
)
def test_a_number_that_is_refused_says_why(name: str, value: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=re.escape(f"AUTOPROF_{name}: got {value!r}{why}; it takes a number of ")):
        load({f"AUTOPROF_{name}": value}, tmp_path)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('what = "step"', "factor is missing"),
        ('what = "step"\nfactor = 1', "a factor must be above 1"),
        ('what = "step"\nfactor = 2\nabove = 2', "step takes no above"),
        ('what = "memory"\nabove = 90', "a share must be between 0 and 1"),
        ('what = "oom"\nfactor = 2', "oom takes no factor"),
        ('what = "resume"\ncool_down = 3', "a run is resumed only once"),
        ("factor = 2", "what is missing"),
        ('what = "two words"\nfactor = 2', "it takes one of step, rank"),
        ('what = "step"\nfactor = 2\ncool_down = -1', "it takes a number of steps"),
        ('what = "step"\nfactor = 2\ncontents = "gpu"', "[[when]] contents: got 'gpu'"),
        ('what = "step"\nfactor = 2\ndir = "/"', "[[when]] 'dir': there is no such setting here"),
        ("'step>2x'", "it can't be read as TOML"),
        ('what = "hang"', "hang takes either above, a time, or factor"),
        ('what = "hang"\nabove = 10', "above takes a time such as 10m, 90s or 1.5h, or off"),
        ('what = "hang"\nabove = "10 minutes"', "or for hang a time such as 10m, or off"),
        ('what = "hang"\nabove = "10m"\nfactor = 5', "hang takes either above, a time, or factor"),
        ('what = "hang"\nfactor = 5\nsteps = 2', "hang opens no window: it takes no steps"),
        ('what = "hang"\nfactor = 0.5', "a factor must be above 1"),
        ('what = "memory"\nabove = "10m"', "a time is for hang only"),
    ],
)
def test_a_wrong_condition_is_one_line_that_says_why(table: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "autoprof.toml").write_text(f"[[when]]\n{table}\n")
    with pytest.raises(SettingsError) as caught:
        load({}, tmp_path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "autoprof.toml"))
    assert "\n" not in str(caught.value)


condition_tables = st.dictionaries(
    st.sampled_from([*settings.CONDITION_FIELDS, "dir"]),
    st.one_of(
        toml_values, st.sampled_from(["step", "memory", "oom", "resume", "cpu"]), st.floats(0, 3), st.integers(0, 9)
    ),
    max_size=5,
)


@given(tables=st.lists(st.one_of(condition_tables, toml_values), max_size=3))
def test_no_tables_give_anything_but_conditions_or_one_line(
    tables: list[object], tmp_path: Path, mocker: MockerFixture
) -> None:
    (tmp_path / "autoprof.toml").touch()
    mocker.patch("autoprof.config.settings.msgspec.toml.decode", return_value={"when": tables})
    try:
        read = load({}, tmp_path)
    except SettingsError as error:
        assert "\n" not in str(error)
    else:
        assert all(each.steps > 0 and each.cool_down >= 0 for each in read.when)
        handed = msgspec.json.decode(msgspec.json.encode(read), type=Settings)
        assert [str(each) for each in handed.when] == [str(each) for each in read.when]


words_of_conditions = st.sampled_from(
    [
        *("step", "gen", "memory", "rank", "resume", "oom", "hang", "off"),
        *(">", ":", "2", "0.9", "x", "s", "m", "h", ",", " "),
    ]
)


@pytest.mark.parametrize(
    ("text", "seconds", "factor"),
    [("hang>10m", 600, 10), ("hang>90s", 90, 90), ("hang>1.5h", 5400, 1.5), ("hang>5x", 0, 5), ("hang:off", 0, 0)],
)
def test_a_hang_is_a_time_or_a_factor(text: str, seconds: float, factor: float) -> None:
    (read,) = selection.parse_conditions(text)
    assert (read.seconds, read.above, str(read), read.off) == (seconds, factor, text, text == "hang:off")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hang", "'hang' is not a condition; hang takes a time such as 10m, a factor such as 5x, or hang:off"),
        ("hang=10m", "hang takes a time such as 10m"),
        ("hang:on", "hang takes a time such as 10m"),
        ("hang>10", "'hang>10': hang takes a time in s, m or h such as 10m, or a factor such as 5x"),
        ("hang>10min", "hang takes a time in s, m or h"),
        ("hang>0s", "it must be above 0; hang:off switches it off"),
        ("hang>1x", "a factor must be above 1"),
        ("step>10m", "a time such as 10m is for hang only"),
        ("Hang>10m", "a time such as 10m is for hang only"),
    ],
)
def test_what_is_nearly_a_hang_is_named(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        selection.parse_conditions(text)


@given(st.lists(words_of_conditions, max_size=12).map("".join))
def test_what_is_taken_reads_the_same_again(text: str) -> None:
    try:
        read = selection.parse_conditions(text)
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert selection.parse_conditions(",".join(map(str, read))) == read


def test_names_that_there_are_not_are_said_with_the_nearest(tmp_path: Path) -> None:
    assert settings.unknown(["AUTOPROF_RANK", "AUTOPROF_FOO", "AUTOPROF", "AUTOPROF_STEPS", "PATH"]) == [
        "AUTOPROF_FOO is ignored: there is no such setting",
        "AUTOPROF_RANK is ignored: there is no such setting; did you mean 'AUTOPROF_RANKS'?",
    ]
    (tmp_path / "autoprof.toml").write_text("step = 2")
    with pytest.raises(SettingsError, match="'step': there is no such setting here; did you mean 'steps'"):
        load({}, tmp_path)


def test_every_variable_that_autoprof_reads_or_sets_is_known() -> None:
    code = "".join(path.read_text() for path in [*ROOT.glob("autoprof/**/*.py"), *ROOT.glob("sitecustomize/*.py")])
    assert settings.unknown(set(re.findall(r"AUTOPROF_[A-Z_]*[A-Z]", code))) == []


# Structs that msgspec never decodes in a run: they are only made, encoded or pickled, or only commands decode them.
NEVER_READ = {"BoundHook", "ProcessState", "JournalIndex", "_CachedStates", "_CachedStep"}


NEVER_READ |= {"RunningStage", "_ServerWindow", "_WatchedObject"}


# Structs of a run whose description needs Python code, because they contain other structs or literals. The behaviours
# of recipes are left out, since only one thread at a time reads them (`hooks/registry.py`).
DESCRIBED = """
import gc, importlib, json, pkgutil, typing, msgspec, autoprof
from autoprof.hooks.behaviour import Behaviour

def all_of(kind):
    for each in type.__subclasses__(kind):
        yield each
        yield from all_of(each)

def parts(kind):
    yield kind
    for each in typing.get_args(kind):
        yield from parts(each)

def helped(kind):
    try:
        fields = msgspec.structs.fields(kind)
    except NameError:  # a type that only a type checker imports; such a struct can't be read
        return False
    inner = [part for field in fields for part in parts(field.type)]
    holds = [part for part in inner if isinstance(part, type) and issubclass(part, msgspec.Struct)]
    return bool(holds) or typing.Literal in map(typing.get_origin, inner)

def described(kind):
    return any(type(each).__name__ == "StructInfo" for each in gc.get_referents(kind))

class Own(msgspec.Struct):
    pass

assert not described(Own)
msgspec.json.Decoder(Own)
assert described(Own)

for room in ("behaviours", "hooks", "capture", "windows", "run", "rundir", "config"):
    package = importlib.import_module(f"autoprof.{room}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if "finisher" not in module.name:
            importlib.import_module(module.name)
ours = [kind for kind in all_of(msgspec.Struct) if kind.__module__.startswith("autoprof.")]
kinds = [kind for kind in ours if not issubclass(kind, Behaviour) and helped(kind)]
print(json.dumps({kind.__name__: described(kind) for kind in kinds}))
"""


# Without that, 2 of 100 runs crashed in which several threads read the same struct first.
def test_structs_that_hold_others_are_described_before_threads_read_them(python: Python) -> None:
    found: dict[str, bool] = json.loads(python(DESCRIBED).stdout)
    assert {"RunFile", "ProcessLine", "Settings", "Became"} <= found.keys()
    assert {name for name, described in found.items() if not described} == NEVER_READ
