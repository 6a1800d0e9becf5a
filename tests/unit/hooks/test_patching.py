"""Hooks on made-up targets, in real interpreters, from activation to the files on disk, for each kind of function."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import Python, processes_of, spans
from tests.support.recipe_texts import recipe

TRAINER = """
import functools
class Trainer:
    def __init__(self): self.global_steps = 0
    def step(self, value): return value * 2
    @staticmethod
    def still(value): return value
    @classmethod
    def made(cls, value): return (cls.__name__, value)
    async def later(self, value): return value
class Child(Trainer): pass
def stamp(function):
    @functools.wraps(function)
    def stamped(*args): return ("stamped", function(*args))
    return stamped
@stamp
def decorated(value): return value
def generator(): yield 1
"""


def hook(name: str, attribute: str, more: str = "", module: str = "target.trainer") -> str:
    text = more or f'behaviour = "span"\noptions = {{ stage = "{name}", role = "trainer" }}'
    return f'[[hook]]\nname = "{name}"\nmodule = "{module}"\nattribute = "{attribute}"\n{text}\n'


@pytest.fixture
def run(tmp_path: Path, python: Python) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code that may import `target.trainer`, with a recipe of these hooks."""
    package = tmp_path / "lib" / "target"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "trainer.py").write_text(TRAINER)

    def go(hooks: str, code: str, head: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "target.toml").write_text(f'target = "target"\n{head}\n{hooks}')
        settings = {"AUTOPROF": "1", "AUTOPROF_RECIPES": str(tmp_path / "target.toml")} | variables
        return python(code, PYTHONPATH=str(tmp_path / "lib"), **settings)

    return go


def left(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Return `run.json`, the hooks of the only process, and its timeline."""
    run_dir = tmp_path / "autoprof_runs" / "latest"
    (process,) = processes_of(run_dir)
    return json.loads((run_dir / "run.json").read_text()), process, spans(run_dir)


def test_functions_methods_and_decorated_ones(run: Any, tmp_path: Path) -> None:
    hooks = (
        hook("step", "Trainer.step")
        + hook("still", "Trainer.still")
        + hook("made", "Trainer.made")
        + hook("later", "Trainer.later")
        + hook("inherited", "Child.step")
        + hook(
            "decorated",
            "decorated",
            'behaviour = "span"\nrewrap = "target.trainer.stamp"\noptions = { stage = "decorated", role = "trainer" }',
        )
    )
    code = """
import asyncio
from target import trainer
T = trainer.Trainer
t = T()
print(t.step(2), t.still(3), T.made(4), asyncio.run(t.later(5)), trainer.decorated(6), trainer.Child().step(7))
"""
    assert run(hooks, code).stdout.strip() == "4 3 ('Trainer', 4) 5 ('stamped', 6) 14"
    info, process, spans = left(tmp_path)
    assert {entry["state"] for key, entry in process["hooks"].items() if key.startswith("target/")} == {"applied"}
    assert [span["name"] for span in spans] == ["step", "still", "made", "later", "decorated", "step", "inherited"]
    assert process["errors"] == {}
    assert info["state"] == "ended"
    assert info["recipes"] == ["target"]
    assert info["hosts"] == [process["host"]]


def test_outcomes_have_reasons(run: Any, tmp_path: Path) -> None:
    hooks = (
        hook("good", "Trainer.step")
        + hook("gone", "Trainer.missing")
        + hook("no-class", "Nobody.step")
        + hook("generator", "generator")
        + hook("unimported", "x", module="target.other")
        + hook("disabled", "Trainer.still")
        + hook(
            "other-version",
            "Trainer.made",
            'behaviour = "span"\nversions = ">=99"\noptions = { stage = "x", role = "y" }',
        )
    )
    run(hooks, "import target.trainer", 'distributions = ["pluggy"]', AUTOPROF_DISABLE="target/disabled")
    _, process, _ = left(tmp_path)
    outcome = {
        key.removeprefix("target/"): (entry["state"], entry["reason"]) for key, entry in process["hooks"].items()
    }
    assert outcome["good"][0] == "applied"
    assert outcome["gone"] == ("skipped", "Trainer has no missing")
    assert outcome["no-class"] == ("skipped", "target.trainer has no Nobody")
    assert outcome["generator"] == ("failed", 'TypeError: it is a generator function; set around = "next"')
    assert outcome["unimported"] == ("skipped", "the module was not imported here")
    assert outcome["disabled"] == ("skipped", "AUTOPROF_DISABLE names it")
    assert outcome["other-version"][0] == "skipped"
    assert "the hook is for >=99" in outcome["other-version"][1]


def test_files_of_one_target_share_their_hooks_names(run: Any, tmp_path: Path) -> None:
    head = 'target = "target"\n'
    (tmp_path / "target.more.toml").write_text(head + hook("step", "Trainer.still") + hook("later", "Trainer.later"))
    (tmp_path / "target.left_out.toml").write_text(head + hook("made", "Trainer.made"))
    files = ",".join(str(tmp_path / f"target{part}.toml") for part in ("", ".more", ".left_out"))
    disabled = "target.left*,target/lat*"
    run(
        hook("step", "Trainer.step") + hook("inherited", "Child.step"),
        "import target.trainer",
        AUTOPROF_RECIPES=files,
        AUTOPROF_DISABLE=disabled,
    )
    _, process, _ = left(tmp_path)
    found = {key: (entry["attribute"], entry["state"]) for key, entry in process["hooks"].items()}
    assert found == {
        "target/step": ("Trainer.still", "applied"),
        "target/inherited": ("Child.step", "applied"),
        "target/later": ("Trainer.later", "skipped"),
        "target/made": ("Trainer.made", "skipped"),
    }


def test_a_target_that_is_only_imported_leaves_nothing(run: Any, tmp_path: Path) -> None:
    run(hook("step", "Trainer.step"), "import target")
    assert not (tmp_path / "autoprof_runs").exists()


def test_a_wrong_setting_is_one_line_and_the_run_continues(run: Any, tmp_path: Path) -> None:
    code = "import os; from target import trainer; print(trainer.Trainer().step(2), os.environ['AUTOPROF'])"
    result = run(hook("step", "Trainer.step"), code, AUTOPROF_STEPS="5:2")
    assert result.stdout.strip() == "4 0"
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("autoprof: AUTOPROF_STEPS: got '5:2' (5:2 is an empty range); it takes a step (2)")
    assert not (tmp_path / "autoprof_runs").exists()


def test_a_wrong_recipe_is_one_line_and_the_others_apply(run: Any, tmp_path: Path) -> None:
    bad = tmp_path / "target.bad.toml"
    bad.write_text('target = "target"\n[[hook]]\nname = "x"\n')
    recipes = f"{bad}:{tmp_path / 'target.toml'}"
    code = "from target import trainer; print(trainer.Trainer().step(2))"
    result = run(hook("step", "Trainer.step"), code, AUTOPROF_RECIPES=recipes)
    assert result.stdout.strip() == "4"
    assert result.stderr.count("\n") == 1
    assert f"{bad}: [[hook]] 'x'" in result.stderr
    _, process, spans = left(tmp_path)
    assert [span["name"] for span in spans] == ["step"]
    assert process["errors"]["target.bad.toml"]["count"] == 1


def test_recipes_of_the_settings_file_are_known_once_a_target_is_imported(run: Any, tmp_path: Path) -> None:
    (tmp_path / "autoprof.toml").write_text('recipes = ["more"]')
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "other.toml").write_text(
        'target = "other"\n' + hook("work", "work", module="other").replace('role = "trainer"', 'role = "x"')
    )
    (tmp_path / "lib" / "other.py").write_text("def work(): return 1")
    code = "import ray; import other; print(other.work())"
    result = run("hook = []", code, AUTOPROF_RECIPES="")
    assert result.stdout.strip() == "1"
    assert [span["name"] for span in left(tmp_path)[2]] == ["work"]


def test_an_error_in_a_behaviour_is_counted_and_printed_once(run: Any, tmp_path: Path) -> None:
    hooks = hook("step", "Trainer.step", 'behaviour = "step.wrap"\noptions = { number = "self.no.such.path" }')
    code = "from target import trainer; t = trainer.Trainer(); print([t.step(n) for n in range(4)])"
    result = run(hooks, code)
    assert result.stdout.strip() == "[0, 2, 4, 6]"
    assert result.stderr.count("\n") == 1
    assert "target/step: LookupError: Trainer has no no (path no.such.path)" in result.stderr
    assert left(tmp_path)[1]["errors"]["target/step"]["count"] == 4


def test_a_target_imported_before_activation_is_patched_late(run: Any, tmp_path: Path) -> None:
    code = """
import os
from target import trainer
os.environ["AUTOPROF"] = "1"
import _autoprof_gate
print(trainer.Trainer().step(2))
"""
    run(hook("step", "Trainer.step"), code, AUTOPROF="0")
    assert [span["name"] for span in left(tmp_path)[2]] == ["step"]


def test_the_command_line_is_stored_without_secrets(run: Any, tmp_path: Path) -> None:
    code = "import sys; from target import trainer"
    run(hook("step", "Trainer.step"), code, AUTOPROF_ON_FINISH="true hunter2")
    text = (tmp_path / "autoprof_runs" / "latest" / "run.json").read_text()
    assert "hunter2" not in text
    assert '"on_finish": "(set)"' in text


def test_a_function_is_replaced_where_it_was_imported_by_its_name_before_the_run(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    code = """
from target.trainer import decorated
import autoprof; autoprof.start('')
decorated(1); autoprof.stop(); decorated(2)
"""
    run(hook("late", "decorated"), code, AUTOPROF="")
    _, _, timeline = left(tmp_path)
    assert [span["name"] for span in timeline] == ["late"]


def test_a_file_with_recipes_of_two_targets(run: Any, tmp_path: Path, python: Python) -> None:
    (tmp_path / "lib").mkdir(exist_ok=True)
    (tmp_path / "lib" / "second.py").write_text("def work(): ...\n")
    hooks = hook("step", "Trainer.step").replace("[[hook]]", "[[recipe.hook]]")
    second = hook("work", "work", module="second").replace("[[hook]]", "[[recipe.hook]]")
    path = tmp_path / "target+second.toml"
    path.write_text(f'[[recipe]]\ntarget = "target"\n{hooks}[[recipe]]\ntarget = "second"\n{second}')
    code = "from target.trainer import Trainer\nTrainer().step(1)\nimport second\nsecond.work()"
    run("", code, AUTOPROF_RECIPES=str(path))
    _, process, found = left(tmp_path)
    assert [span["name"] for span in found] == ["step", "work"]
    assert {key for key, entry in process["hooks"].items() if entry["state"] == "applied"} == {
        "target/step",
        "second/work",
    }


TOY = """
import abc, asyncio, contextlib, enum, functools, operator, types

class Other:
    def bound(self, value): return (type(self).__name__, value)
    def __call__(self, value): return value
    @property
    def extra(self): return 1

class Binding(Other):
    def __get__(self, instance, owner=None): return functools.partial(self, instance) if instance else self

class Kinds(Other):
    def method(self, value): return (type(self).__name__, value)
    async def amethod(self, value): return (type(self).__name__, value)
    @classmethod
    def clsmethod(cls, value): return (cls.__name__, value)
    @classmethod
    async def aclsmethod(cls, value): return (cls.__name__, value)
    @staticmethod
    def static(value): return value
    @staticmethod
    async def astatic(value): return value
    @abc.abstractmethod
    def abstract(self, value): return value
    @contextlib.contextmanager
    def manager(self, value): yield value
    @contextlib.asynccontextmanager
    async def amanager(self, value): yield value
    def __call__(self, value): return value
    builtin = abs
    slot = object.__repr__
    borrowed = Other().bound
    partial = functools.partial(operator.add, 1)
    lambda_ = lambda self, value: value

    generator_ran = False
    def generator(self, value): yield value
    async def agenerator(self, value): yield value
    @classmethod
    def clsgenerator(cls, value): yield value
    @staticmethod
    async def stagenerator(value): yield value
    @types.coroutine
    def old(self, value): yield value
    @property
    def prop(self): return 3
    @functools.cached_property
    def cached(self): return 4
    part = functools.partialmethod(method, 5)
    @functools.singledispatchmethod
    def single(self, value): return value
    @functools.lru_cache
    def lru(self, value): return value
    callable_ = Other()
    descriptor = Binding()
    number = 7
    class Nested: pass

@functools.lru_cache
def cached_function(value): return value
instance = Other()
Class = Kinds.Nested
def generator(value): yield value
async def agenerator(value): yield value
@functools.singledispatch
def dispatched(value): return value
@dispatched.register
def _(value: str): return value.upper()
def made(value): return value
made.mark = object()
async def amade(value): return value
partial = functools.partial(made)
builtin = len

# In a table they would be replaced.
ORIGINAL = (*globals().items(), *((f"Kinds.{name}", value) for name, value in vars(Kinds).items()))
"""


WRAPPED = {
    "Kinds.method": "[k.method(1), Kinds.method(k, value=2)]",
    "Kinds.amethod": "[run(k.amethod(1)), run(Kinds.amethod(k, value=2))]",
    "Kinds.clsmethod": "[k.clsmethod(1), Kinds.clsmethod(2), Child.clsmethod(3)]",
    "Kinds.aclsmethod": "[run(k.aclsmethod(1)), run(Child.aclsmethod(3))]",
    "Kinds.static": "[k.static(1), Kinds.static(2)]",
    "Kinds.astatic": "[run(k.astatic(1)), run(Kinds.astatic(2))]",
    "Kinds.abstract": "[Kinds.abstract.__isabstractmethod__, k.abstract(1)]",
    "Kinds.manager": "[enter(k.manager(1))]",
    "Kinds.amanager": "[run(aenter(k.amanager(1)))]",
    "Kinds.__call__": "[k(1), callable(k)]",
    "Kinds.bound": "[k.bound(1), Other().bound(2), Kinds.bound(k, 3)]",
    "Kinds.builtin": "[k.builtin(-1), Kinds.builtin(-2)]",
    "Kinds.slot": "[k.slot() == object.__repr__(k)]",
    "Kinds.borrowed": "[k.borrowed(1), Kinds.borrowed(2)]",
    "Kinds.partial": "[k.partial(1), Kinds.partial(2)]",
    "Kinds.lambda_": "[k.lambda_(1), Kinds.lambda_(k, 2)]",
    "dispatched": "[target.toy.dispatched(1), target.toy.dispatched('a'), len(target.toy.dispatched.registry)]",
    "made": "[target.toy.made(1), target.toy.made.mark is dict(target.toy.ORIGINAL)['made'].mark]",
    "amade": "[run(target.toy.amade(1)), inspect.iscoroutinefunction(target.toy.amade)]",
    "partial": "[target.toy.partial(1)]",
    "builtin": "[target.toy.builtin([1])]",
}


GENERATORS = ["Kinds.generator", "Kinds.agenerator", "Kinds.clsgenerator", "Kinds.stagenerator", "Kinds.old"]


OTHER_TYPES = {
    "Kinds.prop": "property",
    "Kinds.cached": "cached_property",
    "Kinds.part": "partialmethod",
    "Kinds.single": "singledispatchmethod",
    "Kinds.lru": "_lru_cache_wrapper",
    "Kinds.callable_": "Other",
    "Kinds.descriptor": "Binding",
    "Kinds.number": "int",
    "Kinds.Nested": "type",
    "Class": "type",
    "cached_function": "_lru_cache_wrapper",
    "instance": "Other",
}


REFUSED = dict.fromkeys(
    (*GENERATORS, "generator", "agenerator"), 'TypeError: it is a generator function; set around = "next"'
)


REFUSED |= {name: f"TypeError: it is a {kind}, not a function" for name, kind in OTHER_TYPES.items()}


CHECK = f"""
import asyncio, inspect, json
import target.toy
from target.toy import Kinds, Other
class Child(Kinds): pass
run, k = asyncio.run, Kinds()
def enter(manager):
    with manager as value: return value
async def aenter(manager):
    async with manager as value: return value
def now(path):
    return vars(Kinds).get(path.removeprefix("Kinds.")) if "." in path else vars(target.toy)[path]
same = [path for path in {[*WRAPPED, *REFUSED]!r} if now(path) is dict(target.toy.ORIGINAL).get(path)]
results = {{path: repr(eval(call)) for path, call in {WRAPPED!r}.items()}}
print(json.dumps([same, results]))
"""


@pytest.fixture
def check(tmp_path: Path, python: Python) -> Callable[..., tuple[list[str], dict[str, str]]]:
    """Import the toy. Return the names whose object is the same as before, and the result of each call."""
    package = tmp_path / "lib" / "target"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "toy.py").write_text(TOY)
    options = 'stage = "{}", role = "toy"'
    hooks = [(path, f"target.toy:{path}", "span", options.format(path.lower())) for path in [*WRAPPED, *REFUSED]]
    (tmp_path / "target.toml").write_text(recipe("target", *hooks))

    def go(**variables: str) -> tuple[list[str], dict[str, str]]:
        settings = {"AUTOPROF_RECIPES": str(tmp_path / "target.toml"), "PYTHONPATH": str(tmp_path / "lib")}
        return json.loads(python(CHECK, **settings, **variables).stdout)

    return go


def test_each_kind(check: Any, tmp_path: Path) -> None:
    same, results = check(AUTOPROF="1")
    _, expected = check()
    assert results == expected
    assert sorted(same) == sorted(REFUSED)
    (process,) = processes_of(tmp_path / "autoprof_runs" / "latest")
    states = {key.removeprefix("target/"): (hook["state"], hook["reason"]) for key, hook in process["hooks"].items()}
    assert {path: states[path] for path in WRAPPED} == dict.fromkeys(WRAPPED, ("applied", ""))
    assert {path: states[path] for path in REFUSED} == {path: ("failed", why) for path, why in REFUSED.items()}
    assert [path for path in WRAPPED if not process["hooks"][f"target/{path}"]["called"]] == []
    assert process["errors"] == {}
