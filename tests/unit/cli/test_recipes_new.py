"""`autoprof recipes --new`: first recipes for real trainers, and for small ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoprof.cli.main import main
from autoprof.hooks import recipe
from tests.support.recipe_texts import OWN

OWN_TRAINER = """
class Policy:
    def generate(self, prompts): return prompts

class Base:
    def save_checkpoint(self): ...

class Trainer(Base):
    def __init__(self):
        self.global_step = 0
        self.rank = 0
        self.policy = Policy()
        self.engine = make_engine()
    @property
    def reward_fn(self): ...
    def compute_rewards(self, samples): ...
    def generate_batches(self):
        yield 1
    def update_actor(self, samples, rewards): return self.compute_log_probs(samples)
    def compute_log_probs(self, samples): ...
    def train_step(self, prompts):
        rewards = self.compute_rewards(self.policy.generate(prompts))
        self.engine.update_critic(rewards)
        return self.update_actor(prompts, rewards)
    def train(self):
        for prompts in range(4):
            self.train_step(prompts)
            self.global_step += 1
            LAST
"""


@pytest.fixture
def new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Returns the hooks of the recipe for a place, once `--check` has called it good."""
    monkeypatch.chdir(tmp_path)

    def draft(place: str) -> tuple[dict[str, dict[str, Any]], str]:
        assert main(["recipes", "--new", place]) == 0
        text = capsys.readouterr().out
        document = msgspec.toml.decode(text)
        path = tmp_path / f"{document['target']}.mine.toml"
        path.write_text(text)
        assert main(["recipes", "--check", str(path)]) == 0
        checked = capsys.readouterr().out
        assert f"{path}: good" in checked
        assert "not checked" not in checked
        return {hook["attribute"]: hook for hook in document["hook"]}, text

    return draft


def steps(hooks: dict[str, dict[str, Any]]) -> dict[str, tuple[str, dict[str, Any]]]:
    return {
        attribute: (hook["behaviour"], hook.get("options", {}))
        for attribute, hook in hooks.items()
        if hook["behaviour"].startswith("step.")
    }


def kinds(hooks: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {attribute: hook["kind"] for attribute, hook in hooks.items() if "kind" in hook}


def script(folder: Path, last: str) -> None:
    (folder / "train.py").write_text(OWN_TRAINER.replace("LAST", last))


def test_a_script_of_ones_own(new: Any, tmp_path: Path) -> None:
    script(tmp_path, "pass")
    hooks, text = new("train.py")
    assert steps(hooks) == {"Trainer.train_step": ("step.wrap", {"number": "self.global_step", "offset": 1})}
    assert kinds(hooks) == {
        "Trainer.compute_rewards": "reward",
        "Trainer.compute_log_probs": "log_prob",
        "Trainer.update_actor": "update_actor",
        "Trainer.save_checkpoint": "checkpoint",
        "Policy.generate": "generate",
    }
    assert hooks["Trainer.compute_rewards"]["options"]["rank"] == "self.rank"
    assert {hook["module"] for hook in hooks.values()} == {"train.py"}
    assert "# The loop also calls self.engine.update_critic" in text
    assert new("train.py:Trainer")[0] == hooks


def test_what_follows_the_call_in_the_loop_is_part_of_the_step(new: Any, tmp_path: Path) -> None:
    script(tmp_path, "self.save_checkpoint()")
    hooks, _ = new("train.py")
    assert steps(hooks) == {
        "Trainer.train_step": ("step.begin", {"number": "self.global_step", "offset": 1}),
        "Trainer.train": ("step.loop", {}),
    }


COUNTING = """
class Trainer:
    def generate(self): ...
    def update_actor(self): ...
    def advance(self):
        "Count."
        self.global_step += 1
    def train_step(self):
        self.generate()
        self.update_actor()
    def fit(self):
        self.global_step = 100
        LOOP
"""
HERE, BEFORE = {"number": "self.global_step"}, {"number": "self.global_step", "offset": 1}


@pytest.mark.parametrize(
    ("loop", "options"),
    [
        ("for self.global_step in range(3): self.train_step()", HERE),
        ("for i in range(3): self.global_step = i + 1; self.train_step()", HERE),
        ("for i in range(3): self.train_step(); self.global_step = i", BEFORE),
        ("while True: self.advance(); self.train_step()", HERE),
        ("while True: self.train_step(); self.advance()", BEFORE),
        ("for i in range(3): self.train_step(); self.global_step = 0", {}),
    ],
)
def test_what_counts_the_steps(new: Any, tmp_path: Path, loop: str, options: dict[str, Any]) -> None:
    (tmp_path / "train.py").write_text(
        COUNTING.replace("LOOP", loop.replace("; ", "\n            ").replace(": ", ":\n            ", 1))
    )
    hooks, text = new("train.py")
    assert steps(hooks) == {"Trainer.train_step": ("step.wrap", options)}
    assert ("# One call is one step. No counter was found, so steps are counted from 1" in text) == (not options)


def test_a_step_is_no_stage_beside_the_only_one_in_it(new: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COUNTING.replace("        self.generate()\n", "").replace("LOOP", "pass"))
    hooks, _ = new("train.py")
    assert kinds(hooks) == {"Trainer.generate": "generate", "Trainer.update_actor": "update_actor"}
    assert list(steps(hooks)) == ["Trainer.train_step"]


def test_what_is_no_function_is_left_out(new: Any, tmp_path: Path) -> None:
    kept = COUNTING.replace("    def generate", "    @functools.lru_cache(maxsize=None)\n    def generate")
    (tmp_path / "train.py").write_text("import functools\n" + kept.replace("LOOP", "pass"))
    assert kinds(new("train.py")[0]) == {"Trainer.update_actor": "update_actor"}


def test_a_script_without_a_class(new: Any, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "def generate(): ...\ndef train_step(step, batch): ...\n"
        "def main():\n    for step in range(3):\n        train_step(step, generate())\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    hooks, _ = new("job.py")
    assert steps(hooks) == {"train_step": ("step.wrap", {"number": "step"})}
    assert kinds(hooks) == {"generate": "generate"}


@pytest.mark.needs("verl")
def test_the_legacy_trainer_of_verl(new: Any) -> None:
    """The draft has the same loop, first call and counter as the hand-written recipe."""
    hooks, text = new("verl.trainer.ppo.ray_trainer:RayPPOTrainer")
    (own,) = [path for path in OWN if path.name == "verl.legacy.toml"]
    known = {hook.hook.name: hook.hook for hook in recipe.load(str(own))}
    assert steps(hooks) == {
        known["step-begin"].attribute: ("step.begin", {"number": known["step-begin"].options["number"]}),
        known["fit"].attribute: ("step.loop", {}),
    }
    assert set(kinds(hooks).values()) >= {
        "values",
        "log_prob",
        "ref_log_prob",
        "update_actor",
        "update_critic",
        "reward",
    }
    assert kinds(hooks)["RayPPOTrainer._validate"] == "validate"
    assert "autoprof already has hooks for verl" in text
    assert not {hook["name"] for hook in hooks.values()} & known.keys()


@pytest.mark.needs("verl")
def test_the_new_trainer_of_verl(new: Any) -> None:
    hooks, _ = new("verl.trainer.ppo.v1.trainer_base:PPOTrainer")
    assert steps(hooks) == {
        "PPOTrainer.on_step_begin": ("step.begin", {"number": "self.global_steps"}),
        "PPOTrainer.fit": ("step.loop", {}),
    }
    assert kinds(hooks)["PPOTrainer._compute_advantage"] == "advantage"


@pytest.mark.needs("transformers")
def test_the_trainer_of_transformers(new: Any) -> None:
    """Its step is in another class, which its loop calls; the class is found through the lazy package."""
    hooks, _ = new("transformers:Trainer")
    (own,) = [path for path in OWN if path.name == "transformers.toml"]
    known = {hook.hook.name: hook.hook for hook in recipe.load(str(own))}
    assert steps(hooks) == {
        known["step-begin"].attribute: ("step.begin", known["step-begin"].options),
        known["train"].attribute: ("step.loop", {}),
    }
    assert kinds(hooks)["Trainer._save_checkpoint"] == "checkpoint"
    assert hooks["Trainer.train"]["module"] == "transformers.trainer"


@pytest.mark.needs("transformers")
def test_a_trainer_on_one_that_autoprof_knows_has_its_steps(new: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from transformers import Trainer\n"
        "class Mine(Trainer):\n"
        "    def training_step(self, *args):\n"
        "        self.sample_answers()\n        return super().training_step(*args)\n"
        "    def sample_answers(self): ...\n"
    )
    hooks, text = new("mine.py")
    assert steps(hooks) == {}
    assert "inherits its steps from transformers.trainer:Trainer" in text
    assert kinds(hooks) == {"Mine.sample_answers": "generate"}


@pytest.mark.parametrize(
    ("place", "said"),
    [
        pytest.param(
            "verl.trainer.ppo.ray_trainer:RayPPOTrianer",
            "did you mean 'RayPPOTrainer'?",
            marks=pytest.mark.needs("verl"),
        ),
        pytest.param("verl.trainer.ppo.ray_trianer:X", "did you mean 'ray_trainer'?", marks=pytest.mark.needs("verl")),
        ("no_such_package.x:X", "no_such_package is not installed here"),
        ("empty.py", "no function in it is named like a step or a stage"),
        ("lacking.py:X", "its classes are Other"),
    ],
)
def test_what_is_not_there(
    place: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("class Trainer:\n    def plot(self): ...\n")
    (tmp_path / "lacking.py").write_text("class Other: ...\n")
    assert main(["recipes", "--new", place]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert place in printed.err
