"""The command `autoprof recipes --check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autoprof.cli.main import main
from autoprof.cli.recipes_try import NO_STAGE
from autoprof.hooks import recipe
from autoprof.hooks.recipe import RecipeError
from tests.support.helpers import ROOT
from tests.support.recipe_checks import write
from tests.support.recipe_texts import OWN
from tests.support.recipe_texts import recipe as recipe_of


def check(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[int, list[str]]:
    status = main(["recipes", "--check", *map(str, paths)])
    printed = capsys.readouterr()
    assert printed.err == ""
    # Most recipes of these tests have one hook.
    return status, [line for line in printed.out.splitlines() if not line.endswith(f": note: {NO_STAGE}")]


# The form


@pytest.mark.needs("verl")
def test_own_recipes_are_good(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = check(capsys, ROOT / "recipes")
    assert status == 0
    assert [line.partition(",")[0] for line in lines[-len(OWN) :]] == [f"{path}: good" for path in OWN]


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
        ("versions:", "got 'new'; use a range such as"),
        ("[[hook]] 'a b' name:", "letters, digits"),
        ("[[hook]] 'a b' module:", "not in the target 'other'"),
        ("[[hook]] 'a b' attribute:", "got 'f()'"),
        ("[[hook]] 'a b' behaviour:", "did you mean 'stage'?; the behaviours are"),
        ("[[hook]] number 2 nam:", "did you mean 'name'?"),
        ("[[hook]] number 2 name:", "it is missing; it takes a text: Name, unique among the hooks of the target"),
        ("[[hook]] number 2 attribute:", "it is missing"),
        ("[[hook]] number 2 versions:", "got 3; it takes a text"),
        ("[[hook]] number 2 options.rol:", "did you mean 'role'?; the keys are: "),
        ("[[hook]] number 2 options.stage:", "got 1; it takes a text, or a table with path, names"),
        ("[[hook]] number 2 options.role:", "it is missing"),
        ("[[hook]] number 2 options.rank:", "got 'self..x'; it takes a path that begins with a parameter"),
        ("[[hook]] number 2 options.when:", "got {'1': 'x'}; it takes a table; each entry is a path"),
        ("[[hook]] 's' rewrap:", "got 'a b'"),
        ("[[hook]] 's' options.replicas[1].pth:", "did you mean 'path'?"),
        ("[[hook]] 's' options.replicas[1].path:", "it is missing"),
        ("[[hook]] 's' options.replicas[1].own_devices:", "got 'yes'; it takes true or false"),
        ("[[hook]] 's' options.replicas[2]:", "got 3; it takes a table"),
        ("[[hook]] 's' options.engines:", "got 'arround'; it takes 'step' or 'around'; did you mean 'around'?"),
        ("[[hook]] 's' options.number:", "there is no such key; the keys are: when, unless"),
        ("[[hook]] 's' name:", "two [[hook]] tables are named 's'"),
    ]
    for begin, part in expected:
        assert [line for line in said if line.startswith(begin) and part in line], (begin, part, said)
    assert len(said) == len(expected) + 1
    assert said[-1] == f"{len(expected)} wrong; nothing else was checked"


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
    assert lines[0] == f"{tmp_path / 'empty'}: the folder has no readable *.toml files"
    assert lines[1] == f"{tmp_path / 'gone.toml'}: there is no such file"
    assert lines[2].startswith(f"{tmp_path / 'mytrainer.toml'}: good, 1 hook; mytrainer is not installed here")


# The target


def write_all(folder: Path, hooks: list[dict[str, str]]) -> Path:
    """Write a recipe with several hooks, named by their index, so that one child process checks them all."""
    text = ""
    for index, hook in enumerate(hooks):
        content = write(folder, **hook).read_text().replace('name = "h"', f'name = "h{index}"')
        text += content if not index else content[content.index("[[hook]]") :]
    path = folder / "mytrainer.toml"
    path.write_text(text)
    return path


def test_hooks_that_fit_the_target(tmp_path: Path, capsys: Any, trainer: Path) -> None:
    hooks = [
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
        {"attribute": "Trainer.made", "behaviour": "step.end"},
        {"attribute": "made", "behaviour": "step.end"},
        {"attribute": "advantage", "options": '{ number = "gamma" }'},
        {"attribute": "Open.here", "options": '{ number = "self.anything" }'},
        {"attribute": "Base.inherited", "behaviour": "step.end"},
        {"module": "mytrainer", "attribute": "Exported.inherited", "behaviour": "step.end"},
        {"module": "mytrainer.sub.deep", "attribute": "run", "behaviour": "step.end"},
    ]
    path = write_all(tmp_path, hooks)
    assert check(capsys, path) == (0, [f"{path}: good, {len(hooks)} hooks; checked against mytrainer"])


def test_hooks_that_do_not_fit_the_target(tmp_path: Path, capsys: Any, trainer: Path) -> None:
    number = "options.number"
    stage = {"behaviour": "stage", "options": '{ stage = "s", role = "r", when = { "config.kind" = "x" } }'}
    cases: list[tuple[dict[str, str], str, str]] = [
        ({"module": "mytrainer.lop"}, "module", "there is no module mytrainer.lop; did you mean 'loop'?"),
        ({"attribute": "Trainr.train_step"}, "attribute", "mytrainer.loop has no Trainr; did you mean 'Trainer'?"),
        ({"attribute": "Trainer.trainstep"}, "attribute", "Trainer has no trainstep; did you mean 'train_step'?"),
        ({"attribute": "advantage.x"}, "attribute", "advantage has no x"),
        ({"attribute": "Trainer"}, "attribute", "Trainer is a class, and step.wrap wraps a function"),
        ({"attribute": "Trainer.batches"}, "around", "Trainer.batches is a generator"),
        ({"attribute": "Trainer.batches", "around": "with"}, "around", "is a generator, but not a context manager"),
        ({"attribute": "Trainer.timer"}, "around", 'Trainer.timer makes a context manager; around = "with"'),
        ({"attribute": "Trainer.rate"}, "attribute", "Trainer.rate is a property"),
        ({"attribute": "Trainer.slow"}, "attribute", "Trainer.slow is a property"),
        ({"attribute": "Trainer.loss"}, "attribute", "Trainer.loss is abstract"),
        ({"attribute": "Trainer.kept"}, "attribute", "Trainer.kept is a _lru_cache_wrapper, not a function"),
        ({"attribute": "scored"}, "attribute", "scored is a Remote, not a function"),
        ({"rewrap": "mytrainer.base.wrap"}, "rewrap", "Trainer.train_step is not decorated"),
        ({"options": '{ number = "bach.number" }'}, number, "no parameter bach; did you mean 'batch'?; it has self, "),
        (stage, "options.when", "Trainer.train_step has no parameter config"),
        (
            {"options": '{ replicas = [{ path = "trainer.servers" }] }'},
            "options.replicas[0].path",
            "Trainer.train_step has no parameter trainer",
        ),
        ({"attribute": "advantage", "options": '{ number = "self.x" }'}, number, "no parameter self"),
    ]
    path = write_all(tmp_path, [hook for hook, _, _ in cases])
    status, lines = check(capsys, path)
    assert status == 1
    assert lines[len(cases) :] == [f"{path}: {len(cases)} wrong, {len(cases)} hooks; checked against mytrainer"]
    for index, (line, (_, key, text)) in enumerate(zip(lines, cases, strict=False)):
        assert line.startswith(f"{path}: [[hook]] 'h{index}' {key}: ")
        assert text in line


def test_undecidable_hooks_give_a_note(tmp_path: Path, capsys: Any, trainer: Path) -> None:
    cases = [
        ({"module": "mytrainer.broken"}, "module: not checked: importing mytrainer.broken raised SyntaxError"),
        ({"module": "mytrainer.ending"}, "module: not checked: importing mytrainer.ending raised SystemExit: 3"),
        ({"module": "mytrainer.needing"}, "module: not checked: importing mytrainer.needing raised ModuleNotFound"),
        (
            {"options": '{ number = "self.globalstep" }'},
            "options.number: Trainer sets no globalstep in its methods; did you mean 'global_step'?",
        ),
    ]
    path = write_all(tmp_path, [hook for hook, _ in cases])
    status, lines = check(capsys, path)
    assert (status, lines[-1]) == (0, f"{path}: good, {len(cases)} hooks; checked against mytrainer")
    for index, (line, (_, text)) in enumerate(zip(lines, cases, strict=False)):
        assert line.startswith(f"{path}: note: [[hook]] 'h{index}' {text}")


def test_a_target_that_ends_the_process_is_not_checked(tmp_path: Path, capsys: Any, trainer: Path) -> None:
    (trainer / "loop.py").write_text("import os\nos._exit(4)")
    path = write(tmp_path)
    (line,) = check(capsys, path)[1]
    assert line.startswith(f"{path}: good, 1 hook; modules, attributes and parameters were not checked: importing the ")
    assert "(status 4)" in line


def test_a_script_is_looked_up_in_its_source(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import would run it."""
    (tmp_path / "train.py").write_text("def train_step(): ...\nraise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, name="train.toml", module="train.py", attribute="train_step")
    assert check(capsys, path) == (0, [f"{path}: good, 1 hook; checked against train"])
    path = write(tmp_path, name="train.toml", module="train.py", attribute="trainstep")
    status, lines = check(capsys, path)
    assert (status, lines[0]) == (
        1,
        f"{path}: [[hook]] 'h' attribute: train.py has no trainstep; did you mean 'train_step'?",
    )


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


def test_versions_without_a_distribution_are_a_note(tmp_path: Path, capsys: Any, trainer: Path) -> None:
    path = write(tmp_path, versions=">99")
    note = "not checked: no distribution states the version of mytrainer, which these hooks compare: h"
    assert check(capsys, path) == (0, [f"{path}: note: {note}", f"{path}: good, 1 hook; checked against mytrainer"])


def test_a_hook_that_replaces_one_of_ours_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ray.mine.toml"
    path.write_text((ROOT / "recipes" / "ray.toml").read_text().replace('"shutdown"\nmodule', '"other"\nmodule'))
    _, lines = check(capsys, path)
    notes = [line for line in lines if "replaces autoprof" in line]
    assert [line.split("'")[1] for line in notes] == ["init", "actor-class", "actor"]
    assert notes[0].startswith(f"{path}: note: [[hook]] 'init' name: ")
    assert notes[0].endswith("in ray.toml")


def test_findings_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], trainer: Path) -> None:
    path = write(tmp_path, attribute="Trainer.gone")
    assert main(["recipes", "--check", str(path), "--json"]) == 1
    finding, note = json.loads(capsys.readouterr().out)["findings"]
    assert (note["text"], note["error"]) == (NO_STAGE, False)
    assert finding == {
        "file": str(path),
        "table": "[[hook]] 'h'",
        "key": "attribute",
        "text": "Trainer has no gone",
        "error": True,
    }


# Several targets in one file

TWO = """
[[recipe]]
target = "mytrainer"
[[recipe.hook]]
name = "step"
module = "mytrainer.loop"
attribute = "Trainer.train_step"
behaviour = "step.wrap"
[[recipe]]
target = "other"
[[recipe.hook]]
name = "step"
attribute = "f"
behaviour = "step.end"
"""


def test_a_file_with_several_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str], trainer: Path) -> None:
    path = tmp_path / "mytrainer+other.toml"
    path.write_text(TWO)
    status, lines = check(capsys, path)
    assert (status, len(lines)) == (0, 1)
    assert lines[0].startswith(f"{path}: good, 2 hooks; checked against mytrainer; other is not installed")
    assert [hook.key for hook in recipe.load(str(path))] == ["mytrainer/step", "other/step"]


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("mytrainer.toml", "", "", "target: it is 'mytrainer+other', but the file's name says 'mytrainer'"),
        ("mytrainer+other.toml", '"other"', '"mytrainer"', "target: two [[recipe]] tables are for one target"),
        ("mytrainer+other.toml", '"f"', '"f()"', "[[recipe]] 'other' [[hook]] 'step' attribute: got 'f()'"),
        ("mytrainer+other.toml", "[[recipe]]", 'target = "other"\n[[recipe]]', "target: there is no such key"),
    ],
)
def test_what_is_wrong_with_one_of_several(
    name: str, old: str, new: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(TWO.replace(old, new, 1) if old else TWO)
    status, lines = check(capsys, path)
    assert status == 1
    assert lines[0].startswith(f"{path}: {said}")
    with pytest.raises(RecipeError):
        recipe.load(str(path))


def test_a_step_is_no_wait_for_an_item(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, around="next")
    status, lines = check(capsys, path)
    assert status == 1
    assert lines[0].startswith(f"{path}: [[hook]] 'h' around: got 'next': the step would be the wait for an item")
    with pytest.raises(RecipeError, match="around"):
        recipe.load(str(path))


# Begins and ends

STAGE = 'stage = "s", role = "r"'


@pytest.mark.parametrize(
    ("begin", "options", "end", "of", "good"),
    [
        ("stage.begin", STAGE, "stage.end", "", True),
        ("stage.begin", STAGE, "stage.end", 'stage = "s"', True),
        ("stage.begin", STAGE, "stage.end", 'stage = "t"', False),
        ("stage.begin", STAGE, "step.end", "", False),
        ("stage.begin", f'{STAGE}, of = "self"', "stage.end", "", False),
        ("stage.begin", f'{STAGE}, of = "self"', "stage.end", 'of = "self"', True),
        ("span.begin", STAGE, "step.end", "", False),
        ("timer.start", "", "step.end", "", False),
        ("timer.start", "", "timer.stop", "", True),
    ],
)
def test_what_begins_has_an_end(
    begin: str, options: str, end: str, of: str, good: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.toml"
    path.write_text(recipe_of("other", ("b", "begin", begin, options), ("e", "end", end, of)))
    status, lines = check(capsys, path)
    assert status == (0 if good else 1)
    needed = "timer.stop" if begin == "timer.start" else "stage.end"
    said = f"{path}: [[hook]] 'b' behaviour: no {needed} hook of other ends what this one begins; add one"
    assert [line.startswith(said) for line in lines[:-1]] == ([] if good else [True])


def test_an_end_may_be_in_another_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.toml").write_text(recipe_of("other", ("b", "begin", "stage.begin", STAGE)))
    (tmp_path / "other.more.toml").write_text(recipe_of("other", ("e", "end", "stage.end", "")))
    assert check(capsys, tmp_path / "other.toml")[0] == 1
    assert check(capsys, tmp_path)[0] == 0


# Kinds


@pytest.mark.parametrize(
    ("hook", "key", "said"),
    [
        ({"behaviour": "stage", "kind": "generat"}, "kind", "did you mean 'generate'?"),
        ({"behaviour": "stage", "kind": "train"}, "kind", "it takes 'generate' or 'reward' or "),
        ({"behaviour": "step.wrap", "kind": "generate"}, "kind", "step.wrap makes no stage; leave it out"),
    ],
)
def test_a_wrong_kind(
    hook: dict[str, str], key: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = '{ stage = "x", role = "actor" }' if hook["behaviour"] == "stage" else "{}"
    status, lines = check(capsys, write(tmp_path, **hook, options=options))
    assert status == 1
    assert lines[0].startswith(f"{tmp_path / 'mytrainer.toml'}: [[hook]] 'h' {key}: ")
    assert said in lines[0]


def test_kinds_by_patterns_are_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, behaviour="stage", options='{ stage = "x", role = "actor" }')
    path.write_text(path.read_text() + 'kind = { x = "generate" }\n')
    assert check(capsys, path)[0] == 0
    path.write_text(path.read_text().replace('"generate"', '"nothing"'))
    status, lines = check(capsys, path)
    assert status == 1
    assert "kind: got {'x': 'nothing'}; it takes" in lines[0]


def test_hooks_that_make_stages_have_a_kind_in_all_own_recipes() -> None:
    """Spans of samples have no kind, a timer's kind comes from its name, and one hook has several kinds."""
    lacking = [
        hook.key
        for path in OWN
        for hook in recipe.load(str(path))
        if hook.behaviour.makes_stages
        and not hook.hook.kind
        and hook.hook.options.get("kind", "stage") == "stage"
        and not hook.hook.behaviour.startswith("timer.")
    ]
    assert lacking == ["openrlhf/experience"]
