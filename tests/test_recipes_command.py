"""`autoprof recipes`: what there is, and what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers import ROOT
from hypothesis import given
from hypothesis import strategies as st
from pytest_mock import MockerFixture
from test_entry_points import declare, install
from test_recipe import GOOD, keys, values

from autoprof import recipe
from autoprof.authoring import form
from autoprof.behaviours import BEHAVIOURS
from autoprof.cli import main
from autoprof.recipe import RecipeError

OWN = sorted((ROOT / "recipes").glob("*.toml"))

TRAINER = """
from abc import abstractmethod
from functools import cached_property

from .base import Base
from outside import Far

class Trainer(Base):
    limit: int = 3

    def __init__(self):
        self.global_step = 0
        self.state, (self.first, _) = None, (1, 2)

    def train_step(self, batch, *, key=None): ...
    async def rollout(self, prompts, **more): ...
    def batches(self):
        yield 1
    def uses(self):
        return [x for x in self.batches()], lambda: (yield)
    @property
    def rate(self): ...
    @cached_property
    def slow(self): ...
    @abstractmethod
    def loss(self): ...
    @staticmethod
    def advantage(values): ...
    made = Base.inherited

class Open(Far):
    def here(self): ...

if True:
    def advantage(values, gamma=1): ...
else:
    advantage = None
made = advantage
"""
BASE = """
class Root:
    def inherited(self): self.from_root = 1
class Base(Root): ...
"""


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target on the path that ends the process if somebody imports it."""
    folder = tmp_path / "lib" / "mytrainer"
    folder.mkdir(parents=True)
    end = "raise SystemExit('the target was imported')\n"
    (folder / "__init__.py").write_text(end + "from .base import Base as Exported\n")
    (folder / "loop.py").write_text(end + TRAINER)
    (folder / "base.py").write_text(end + BASE)
    (folder / "star.py").write_text("from .loop import *\n")
    (folder / "broken.py").write_text("def (:\n")
    (folder / "compiled.so").touch()
    (folder / "sub").mkdir()
    (folder / "sub" / "deep.py").write_text("def run(): ...\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def write(folder: Path, *, name: str = "mytrainer.toml", top: str = "", **hook: str) -> Path:
    """A recipe with one hook, of which some keys are others."""
    known = {
        "name": "h",
        "module": "mytrainer.loop",
        "attribute": "Trainer.train_step",
        "behaviour": "step.wrap",
    } | hook
    options = known.pop("options", "{}")
    lines = [f"{key} = {json.dumps(value)}" for key, value in known.items()]
    path = folder / name
    path.write_text(
        f'target = "{name.split(".")[0]}"\n{top}\n[[hook]]\n' + "\n".join(lines) + f"\noptions = {options}\n"
    )
    return path


def check(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[int, list[str]]:
    status = main(["recipes", "--check", *map(str, paths)])
    printed = capsys.readouterr()
    assert printed.err == ""
    return status, printed.out.splitlines()


# What there is


def test_all_recipes_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, trainer: Path) -> None:
    monkeypatch.setenv("AUTOPROF_RECIPES", str(write(tmp_path, name="mytrainer.mine.toml", top='versions = ">=1,<2"')))
    install(tmp_path / "site", "other-recipes", declare("other_recipes"), "other")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert main(["recipes"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert set(rows) >= {"recipe", "verl", "vllm", "sglang", "ray"}
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
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["installed"], entry["fits"]) == (version, fits)


def test_the_hooks_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "verl"]) == 0
    text = capsys.readouterr().out
    for hook in recipe.load(str(ROOT / "recipes" / "verl.toml")):
        assert f"{hook.hook.module}:{hook.hook.attribute}" in text
    assert 'unless="prompts.meta_info.validate"' in text
    assert 'rewrap="verl.utils.ray_utils.auto_await"' in text


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
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
    assert "names 'empty', and" in empty
    assert "holds no *.toml files" in empty
    assert "lost: entry point 'mine' of autoprof.recipes names 'lost.inner', and there is no such package" in lost


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["verk"], 1, "there is no recipe 'verk'; did you mean 'verl'?; there are"),
        (["zzz"], 1, "there is no recipe 'zzz'; there are"),
        (["verl", "--schema"], 2, "NAME goes without"),
    ],
)
def test_wrong_use(arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", *arguments]) == status
    assert said in capsys.readouterr().err


def test_behaviours_are_listed_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--behaviours"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{name}: " in f"\n{text}" for name in BEHAVIOURS)
    assert "    stage (required): The stage's name" in text
    assert "None" not in text.replace("None where", "")
    assert main(["recipes", "--behaviours", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["stage"]["options"]["stage"]["required"]
    for name, content in listed.items():
        assert content["does"], name
        assert all(option["means"] for option in content["options"].values()), name


# The form


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_own_recipes_are_good(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = check(capsys, path)
    assert status == 0
    assert lines[-1].startswith(f"{path}: good, ")


def test_a_name_that_is_read_from_the_call_is_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.toml"
    hook = '[[hook]]\nname = "s"\nmodule = "other.a"\nattribute = "A.f"\nbehaviour = "stage.begin"\n'
    options = '{ role = { pth = "self.x", names = { a = 1 } }, stage = "x" }'
    path.write_text(f'target = "other"\n{hook}options = {options}\n')
    status, lines = check(capsys, path)
    assert status == 1
    found = [line.removeprefix(f"{path}: [[hook]] 's' options.role.") for line in lines[:-1]]
    assert [line.partition(":")[0] for line in found] == ["pth", "path", "names"]


def test_all_errors_of_a_file_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "thing.toml"
    path.write_text(
        """
target = "other"
version = ">=1"
versions = "new"
passive = 1

[[hook]]
name = "a b"
module = "elsewhere.x"
attribute = "f()"
behaviour = "stagee"

[[hook]]
nam = "x"
behaviour = "stage"
versions = 3
options = { stage = 1, rol = "actor", rank = "self..x", when = { "1" = "x" } }

[[hook]]
name = "s"
module = "other.a"
attribute = "A.f"
behaviour = "step.begin"
rewrap = "a b"
options = { engines = "arround", replicas = [{ path = "self.x" }, { pth = "self.x", own_devices = "yes" }, 3] }

[[hook]]
name = "s"
module = "other.a"
attribute = "A.f"
behaviour = "step.end"
options = { number = "self.x" }
"""
    )
    status, lines = check(capsys, path)
    assert status == 1
    said = [line.removeprefix(f"{path}: ") for line in lines]
    expected = [
        ("version:", "did you mean 'versions'?"),
        ("passive:", "got 1; it takes true or false"),
        ("target:", "name the file other.toml"),
        ("versions:", "got 'new'; it takes a range such as"),
        ("[[hook]] 'a b' name:", "letters, digits"),
        ("[[hook]] 'a b' module:", "not in the target 'other'"),
        ("[[hook]] 'a b' attribute:", "got 'f()'"),
        ("[[hook]] 'a b' behaviour:", "did you mean 'stage'?; there are"),
        ("[[hook]] number 2 nam:", "did you mean 'name'?"),
        ("[[hook]] number 2 name:", "it is missing; it takes a text: Unique in the recipe"),
        ("[[hook]] number 2 attribute:", "it is missing"),
        ("[[hook]] number 2 versions:", "got 3; it takes a text"),
        ("[[hook]] number 2 options.rol:", "did you mean 'role'?; there are: "),
        ("[[hook]] number 2 options.stage:", "got 1; it takes a text, or a table with path, names"),
        ("[[hook]] number 2 options.role:", "it is missing"),
        ("[[hook]] number 2 options.rank:", "got 'self..x'; it takes a path that begins with a parameter"),
        ("[[hook]] number 2 options.when:", "got {'1': 'x'}; it takes a table, in it a path"),
        ("[[hook]] 's' rewrap:", "got 'a b'"),
        ("[[hook]] 's' options.replicas[1].pth:", "did you mean 'path'?"),
        ("[[hook]] 's' options.replicas[1].path:", "it is missing"),
        ("[[hook]] 's' options.replicas[1].own_devices:", "got 'yes'; it takes true or false"),
        ("[[hook]] 's' options.replicas[2]:", "got 3; it takes a table"),
        ("[[hook]] 's' options.engines:", "got 'arround'; it takes 'step' or 'around'; did you mean 'around'?"),
        ("[[hook]] 's' options.number:", "there is no such key; there are: when, unless"),
        ("[[hook]] 's' name:", "two [[hook]] tables are named 's'"),
    ]
    for begin, part in expected:
        assert [line for line in said if line.startswith(begin) and part in line], (begin, part, said)
    assert len(said) == len(expected) + 1
    assert said[-1] == f"{len(expected)} wrong; nothing more was checked"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("target = = 3", "it can't be read as TOML"),
        ('target = "thing"\n[hook]\nname = "x"', "hook: got {'name': 'x'}; it takes an array"),
        ('target = "thing"\nhook = [3]', "[[hook]] number 1: got 3; it takes a table"),
        ("hook = []", "target: it is missing"),
        ('target = "thing"', "hook: it is missing"),
    ],
)
def test_forms_that_are_none(content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "thing.toml"
    path.write_text(content)
    status, lines = check(capsys, path)
    assert status == 1
    assert lines[0].startswith(f"{path}: {said}")


def test_places_that_hold_no_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path, behaviour="step.end")
    status, lines = check(capsys, tmp_path, tmp_path / "empty", tmp_path / "gone.toml")
    assert status == 1
    assert lines[0] == f"{tmp_path / 'empty'}: there are no *.toml files in it that can be read"
    assert lines[1] == f"{tmp_path / 'gone.toml'}: there is no such file"
    assert lines[2].startswith(f"{tmp_path / 'mytrainer.toml'}: good, 1 hook; mytrainer is not installed here")


def agrees(path: Path) -> None:
    """`--check` says something in one line each, of those files only that a run would leave out."""
    hooks, findings = form.check(str(path))
    for finding in findings:
        assert "\n" not in finding.line()
        assert finding.text
    try:
        loaded = len(recipe.load(str(path)))
    except RecipeError:
        assert findings
    else:
        assert not findings
        assert loaded == len(hooks)


@given(content=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode(errors="replace")))
def test_no_file_gives_anything_but_hooks_or_findings(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "thing.toml"
    path.write_bytes(content)
    agrees(path)


@given(place=st.integers(0, len(GOOD)), cut=st.integers(0, 12), put=st.text(max_size=6))
def test_no_typing_error_gives_a_traceback(place: int, cut: int, put: str, tmp_path: Path) -> None:
    path = tmp_path / "thing.toml"
    path.write_bytes((GOOD[:place] + put + GOOD[place + cut :]).encode(errors="replace"))
    agrees(path)


words = st.sampled_from(["thing", "thing.a", "self.x", "", "a b", "work", ">=1", "step", "stage", "step.begin", "span"])
scalars = words | st.integers(-1, 1) | st.booleans() | st.none()
loose = st.recursive(scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2))
near_hooks = st.fixed_dictionaries(
    {"name": words, "module": words, "attribute": words},
    optional={
        "behaviour": st.sampled_from(sorted(BEHAVIOURS)),
        "versions": loose,
        "rewrap": words,
        "options": loose
        | st.dictionaries(st.sampled_from(["stage", "role", "rank", "when", "number", "replicas", "action"]), loose),
    },
)


@given(
    document=st.dictionaries(st.sampled_from(keys), values, max_size=6)
    | st.fixed_dictionaries(
        {"target": st.just("thing"), "hook": st.lists(near_hooks, max_size=3)}, optional={"passive": loose}
    )
)
def test_check_and_run_agree_on_every_document(
    document: dict[str, object], tmp_path: Path, mocker: MockerFixture
) -> None:
    path = tmp_path / "thing.toml"
    path.touch()
    mocker.patch("autoprof.recipe.msgspec.toml.decode", return_value=document)
    agrees(path)


# The source of the target


@pytest.mark.parametrize(
    "hook",
    [
        {"options": '{ number = "self.global_step" }'},
        {"options": '{ number = "self.first" }'},
        {"options": '{ number = "self.limit" }'},
        {"options": '{ number = "self.from_root.x" }'},
        {"options": '{ number = "batch.meta.number" }'},
        {"options": '{ number = "key" }'},
        {"attribute": "Trainer.inherited", "behaviour": "step.end"},
        {"attribute": "Trainer.rollout", "behaviour": "rollout.around", "options": '{ unless = "validate" }'},
        {"attribute": "Trainer.uses", "behaviour": "step.end"},
        {"attribute": "Trainer.advantage", "behaviour": "step.end"},
        {"attribute": "advantage", "options": '{ number = "gamma" }'},
        {"attribute": "Open.here", "options": '{ number = "self.anything" }'},
        {"attribute": "Base.inherited", "behaviour": "step.end"},
        {"module": "mytrainer", "attribute": "Exported.inherited", "behaviour": "step.end"},
        {"module": "mytrainer.sub.deep", "attribute": "run", "behaviour": "step.end"},
    ],
)
def test_what_the_source_has(hook: dict[str, str], tmp_path: Path, capsys: Any, trainer: Path) -> None:
    path = write(tmp_path, **hook)
    assert check(capsys, path) == (0, [f"{path}: good, 1 hook; looked up in the source of mytrainer"])


@pytest.mark.parametrize(
    ("hook", "key", "said"),
    [
        ({"module": "mytrainer.lop"}, "module", "there is no module mytrainer.lop; did you mean 'loop'?"),
        ({"attribute": "Trainr.train_step"}, "attribute", "mytrainer.loop has no Trainr; did you mean 'Trainer'?"),
        ({"attribute": "Trainer.trainstep"}, "attribute", "Trainer has no trainstep; did you mean 'train_step'?"),
        ({"attribute": "advantage.x"}, "attribute", "mytrainer.loop has advantage, which is no class"),
        ({"attribute": "Trainer"}, "attribute", "Trainer is a class, and step.wrap wraps a function"),
        ({"attribute": "Trainer.batches"}, "attribute", "Trainer.batches is a generator"),
        ({"attribute": "Trainer.rate"}, "attribute", "Trainer.rate is a property"),
        ({"attribute": "Trainer.slow"}, "attribute", "Trainer.slow is a property"),
        ({"attribute": "Trainer.loss"}, "attribute", "Trainer.loss is abstract"),
        ({"rewrap": "mytrainer.base.wrap"}, "rewrap", "Trainer.train_step is not decorated"),
        (
            {"attribute": "Trainer.advantage", "rewrap": "mytrainer.base.wrap"},
            "rewrap",
            "Trainer.advantage is decorated by staticmethod, not by mytrainer.base.wrap",
        ),
        (
            {"options": '{ number = "bach.number" }'},
            "options.number",
            "Trainer.train_step has no parameter bach; did you mean 'batch'?; it has self, batch, key",
        ),
        (
            {"behaviour": "stage", "options": '{ stage = "s", role = "r", when = { "config.kind" = "x" } }'},
            "options.when",
            "Trainer.train_step has no parameter config",
        ),
        (
            {"options": '{ replicas = [{ path = "trainer.servers" }] }'},
            "options.replicas[0].path",
            "Trainer.train_step has no parameter trainer",
        ),
        ({"attribute": "advantage", "options": '{ number = "self.x" }'}, "options.number", "no parameter self"),
    ],
)
def test_what_the_source_does_not_have(
    hook: dict[str, str], key: str, said: str, tmp_path: Path, capsys: Any, trainer: Path
) -> None:
    path = write(tmp_path, **hook)
    status, lines = check(capsys, path)
    assert status == 1
    assert lines[0].startswith(f"{path}: [[hook]] 'h' {key}: ")
    assert said in lines[0]
    assert lines[1:] == [f"{path}: 1 wrong, 1 hook; looked up in the source of mytrainer"]


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ({"attribute": "made"}, "attribute: not checked: mytrainer.loop makes made in a way that is not looked at"),
        ({"attribute": "Trainer.made"}, "attribute: not checked: Trainer sets made in a way that is not looked at"),
        ({"attribute": "Open.far"}, "attribute: not checked: the base class outside.Far of Open was not found"),
        ({"attribute": "Far.step"}, "attribute: not checked: mytrainer.loop imports it, but outside is not installed"),
        ({"module": "mytrainer.star"}, "attribute: not checked: mytrainer.star makes Trainer in a way"),
        ({"module": "mytrainer.broken"}, "module: not checked: the source of mytrainer.broken can't be read"),
        ({"module": "mytrainer.compiled"}, "module: not checked: mytrainer.compiled has no Python source"),
        ({"module": "mytrainer.sub"}, "module: not checked: mytrainer.sub has no Python source"),
        (
            {"options": '{ number = "self.globalstep" }'},
            "options.number: Trainer sets no globalstep in its source; did you mean 'global_step'?",
        ),
    ],
)
def test_what_the_source_does_not_tell_is_a_note(
    hook: dict[str, str], said: str, tmp_path: Path, capsys: Any, trainer: Path
) -> None:
    (trainer / "compiled.so").rename(trainer / "compiled.abi3.so")
    path = write(tmp_path, **hook)
    status, lines = check(capsys, path)
    assert status == 0
    assert lines[0].startswith(f"{path}: note: [[hook]] 'h' {said}")
    assert lines[1].startswith(f"{path}: good")


def test_versions_decide_what_is_an_error(tmp_path: Path, capsys: Any, trainer: Path) -> None:
    info = trainer.parent / "mytrainer-3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mytrainer\nVersion: 3.0\n")
    status, lines = check(capsys, write(tmp_path, attribute="Trainer.gone", versions="<2"))
    assert (
        status,
        lines[0].endswith("not checked: mytrainer is 3.0 here, and these hooks are for other releases: h"),
    ) == (0, True)
    status, lines = check(capsys, write(tmp_path, attribute="Trainer.gone", top='versions = "<2"'))
    assert (status, "has no gone (mytrainer is 3.0 here, and the recipe is for <2)" in lines[0]) == (0, True)
    status, lines = check(capsys, write(tmp_path, attribute="Trainer.gone", top='versions = ">2"'))
    assert status == 1


def test_findings_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], trainer: Path) -> None:
    path = write(tmp_path, attribute="Trainer.gone")
    assert main(["recipes", "--check", str(path), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding == {
        "file": str(path),
        "table": "[[hook]] 'h'",
        "key": "attribute",
        "text": "Trainer has no gone",
        "error": True,
    }
