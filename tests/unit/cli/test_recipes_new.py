"""`autoprof recipes --new`: first recipes for programs, which run and are measured."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoprof.hooks import recipe
from autoprof.rundir.journal import SpanReader, journals
from tests.support import helpers
from tests.support.helpers import ROOT, Autoprof, autoprof

# A clock that only `work` moves, so that the measured seconds do not depend on the machine.
CLOCK = """
import time
now = [time.perf_counter()]
time.perf_counter = lambda: now[0]

def work(seconds):
    now[0] += seconds
"""
LOOP = """
from clock import work

def load(): return [clean(row) for row in range(200)]
def clean(row): work(0.01)
def generate(rows): work(3)
def compute_rewards(rows): work(1)
def backward(): work(2)
def log(step): work(0.01)
def save_checkpoint(step): work(1)

if __name__ == "__main__":
    rows = load()
    for step in range(1, 7):
        generate(rows)
        compute_rewards(rows)
        backward()
        log(step)
        if step % 3 == 0:
            save_checkpoint(step)
"""
TRAINER = """
import functools
from clock import work

def timed(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

class State:
    global_step = 0
    @property
    def wrong(self): raise RuntimeError("the measurement reads no property")

class Policy:
    def generate(self, batch):
        for token in range(4): self.forward(token)
    def forward(self, token): work(1)

class Base:
    def __init__(self):
        self.state, self.rank, self.policy = State(), 0, Policy()
    @timed
    def update_actor(self, batch):
        for micro in range(2): self._backward(micro)
    def _backward(self, micro): work(1)
    @staticmethod
    def score(batch): work(1)
    def training_step(self, batch):
        self._collect(batch)
        self.update_actor(batch)

class Trainer(Base):
    def fit(self):
        for epoch in range(3):
            self.train_epoch()
            self.evaluate()
    def train_epoch(self):
        for batch in range(4):
            self.state.global_step = self.state.global_step + 1
            LOOP
    def _run_batch(self, batch):
        def nested():
            self._collect(batch)
        nested()
        self.score(batch)
        self.update_actor(batch)
    def training_step(self, batch): super().training_step(batch)
    def _collect(self, batch): self.policy.generate(batch)
    def evaluate(self): work(1)
"""
MAIN = """
from mytrainer.loop import Trainer
def main(): Trainer().fit()
if __name__ == "__main__": main()
"""
ASYNC = """
import asyncio
from clock import work

class Runner:
    def __init__(self): self.version = 0
    async def generate(self, prompt):
        work(1)
        await asyncio.sleep(0)
        work(1)
    async def collect(self):
        await asyncio.gather(*[self.generate(prompt) for prompt in range(3)])
    async def score(self):
        await asyncio.sleep(0)
        work(2)
    async def one_round(self, index):
        await self.collect()
        await self.score()
        self.version += 1
    async def run(self):
        for index in range(5): await self.one_round(index)

asyncio.run(Runner().run())
"""
# Ends the measurement like Ctrl-C, once the workers have run for a while.
WORKERS = """
import multiprocessing, os, signal, time
from clock import work

class Trainer:
    def train_step(self, pool):
        pool.map(compute_score, range(4))
        work(1)

def compute_score(item): work(1)

if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        trainer = Trainer()
        end = time.monotonic() + 3
        while time.monotonic() < end: trainer.train_step(pool)
        os.kill(os.getppid(), signal.SIGINT)
        while True: trainer.train_step(pool)
"""


# Timers of the programs below. Each program prints the seconds and the calls of each timer.
TIMERS = """
import collections, json, time
seconds, calls = collections.defaultdict(float), collections.Counter()

class timed:
    def __init__(self, name): self.name = name
    def __enter__(self): self.began = time.perf_counter()
    def __exit__(self, *raised):
        seconds[self.name] += time.perf_counter() - self.began
        calls[self.name] += 1

def show(): print(json.dumps([seconds, calls]))
"""
# The loop is in the base class, as in stable-baselines3.
BASE_CLASS = """
import base, time
from timers import show, timed

class PPO(base.Algorithm):
    def train(self):
        with timed("train"):
            for epoch in range(3): self.minibatch()
    def minibatch(self): time.sleep(0.002)

class MyPPO(PPO):
    def collect_rollouts(self, number): super().collect_rollouts(number)

if __name__ == "__main__":
    MyPPO().learn(6)
    show()
"""
BASE = """
import time
from timers import timed

class Algorithm:
    updates = 0
    def learn(self, number):
        while self.updates < number:
            with timed("step"):
                self.collect_rollouts(4)
                self.updates = self.updates + 1
                self.train()
    def collect_rollouts(self, number):
        with timed("collect_rollouts"):
            for _ in range(number): time.sleep(0.002)
"""
# Methods are passed by reference to one method that calls them.
REFERENCES = """
import time
from timers import show, timed

class Learner:
    round = 0
    def phase(self, name, function, *args):
        with timed(name): return function(*args)
    def play(self): time.sleep(0.01)
    def judge(self): time.sleep(0.004)
    def improve(self): time.sleep(0.006)
    def run(self):
        for _ in range(6):
            with timed("step"):
                self.round += 1
                self.phase("play", self.play)
                self.phase("judge", self.judge)
                self.phase("improve", self.improve)

if __name__ == "__main__":
    Learner().run()
    show()
"""
TASKS = """
import asyncio, time
from timers import show, timed

class Async:
    version = 0
    async def sample(self): await asyncio.sleep(0.01)
    async def generate_batch(self):
        with timed("generate_batch"): await asyncio.gather(*[self.sample() for _ in range(4)])
    def update(self):
        with timed("update"): time.sleep(0.006)
    async def train(self):
        for _ in range(6):
            with timed("step"):
                self.version += 1
                await self.generate_batch()
                self.update()

if __name__ == "__main__":
    asyncio.run(Async().train())
    show()
"""
GENERATOR = """
import time
from timers import show, timed

def sample_actions():
    with timed("sample_actions"): time.sleep(0.01)
def rollouts():
    for _ in range(6): yield sample_actions()
def backward():
    with timed("backward"): time.sleep(0.008)

class Trainer:
    def fit(self):
        rounds = rollouts()
        while True:
            with timed("step"):
                if next(rounds, "end") == "end": break
                backward()

if __name__ == "__main__":
    Trainer().fit()
    show()
"""
SCRIPT = """
import time
from timers import show, timed

def rollout():
    with timed("rollout"): time.sleep(0.01)
def ppo_update():
    with timed("ppo_update"): time.sleep(0.008)

for iteration in range(6):
    with timed("step"):
        rollout()
        ppo_update()
show()
"""
ACTIONS = """
from clock import work

class Env:
    def step(self, action): work(0.01)
class Agent:
    def get_value(self): work(0.01)
    def get_action_and_value(self): work(0.002)

if __name__ == "__main__":
    env, agent = Env(), Agent()
    for iteration in range(6):
        for step in range(32):
            agent.get_action_and_value()
            env.step(0)
        agent.get_value()
        for epoch in range(4): agent.get_action_and_value()
"""
SPAWNING = """
import multiprocessing, time
from timers import show, timed

def work(pipe):
    while pipe.recv(): pipe.send(simulate())
def simulate(): time.sleep(0.01)

class Coordinator:
    epoch = 0
    def __init__(self):
        spawn = multiprocessing.get_context("spawn")
        self.pipe, other = spawn.Pipe()
        self.worker = spawn.Process(target=work, args=(other,))
        self.worker.start()
    def gather(self):
        with timed("gather"):
            self.pipe.send(True)
            self.pipe.recv()
    def learn(self):
        with timed("learn"): time.sleep(0.008)
    def run_epoch(self):
        with timed("step"):
            self.epoch += 1
            self.gather()
            self.learn()

if __name__ == "__main__":
    coordinator = Coordinator()
    for _ in range(6): coordinator.run_epoch()
    coordinator.pipe.send(False)
    show()
"""


@pytest.fixture
def draft(tmp_path: Path) -> Autoprof:
    """Runs `recipes --new`. The clock is an installed module, which is not measured."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "clock.py").write_text(CLOCK)
    return functools.partial(autoprof, "recipes", "--new", cwd=tmp_path, PYTHONPATH=str(installed))


@pytest.fixture
def new(tmp_path: Path, draft: Autoprof) -> Any:
    """Returns the hooks of the recipe for a command by attribute, and its text, after `recipe.load` accepted it."""

    def measured(target: str, *command: str, options: tuple[str, ...] = ()) -> tuple[dict[str, recipe.Hook], str]:
        path = tmp_path / f"{target}.mine.toml"
        done = draft("-o", str(path), *options, "--", sys.executable, *command)
        assert done.returncode == 0, done.stderr
        assert f"wrote {path}; try it: autoprof recipes --try {path} -- {sys.executable}" in done.stderr
        return {hook.hook.attribute: hook.hook for hook in recipe.load(str(path))}, path.read_text()

    return measured


def write_package(parent: Path, step: str) -> None:
    """Write a trainer whose loop has this step."""
    folder = parent / "mytrainer"
    folder.mkdir()
    (folder / "main.py").write_text(MAIN)
    (folder / "loop.py").write_text(TRAINER.replace("LOOP", step))


def behaviours(hooks: dict[str, recipe.Hook]) -> dict[str, tuple[str, dict[str, Any]]]:
    return {attribute: (hook.behaviour, hook.options) for attribute, hook in hooks.items()}


def stage(name: str, role: str, **options: Any) -> tuple[str, dict[str, Any]]:
    return "stage", {"stage": name, "role": role, **options}


def test_a_script_with_a_loop(new: Any, tmp_path: Path) -> None:
    """No function is a whole step: the first call begins it. The loop over rows of data takes less time."""
    (tmp_path / "train.py").write_text(LOOP)
    _, text = new("train", "train.py")
    document = msgspec.toml.decode(text)["hook"]
    assert [(table["attribute"], table["behaviour"]) for table in document[:2]] == [
        ("generate", "step.begin"),
        ("log", "step.end"),
    ]
    del document[:2]
    assert {table["attribute"]: table.get("kind") for table in document} == {
        "generate": "generate",
        "compute_rewards": "reward",
        "backward": None,
        "save_checkpoint": "checkpoint",
    }
    assert {table["module"] for table in document} == {"train.py"}
    assert "It is the first call of each step: 6 calls. The steps took 36.06 s of " in text
    assert "# No argument or attribute of self counted the calls, so steps are counted from 1.\n" in text
    assert "# 6 calls, 18.00 s: 50% of the steps' time.\n" in text


def test_a_trainer_in_a_package(new: Any, tmp_path: Path) -> None:
    """An epoch is no step. Methods are named by the class that defines them; callees stand for nested functions."""
    write_package(tmp_path, "self._run_batch(batch)")
    hooks, text = new("mytrainer", "-m", "mytrainer.main")
    assert behaviours(hooks) == {
        "Trainer._run_batch": ("step.wrap", {"number": "self.state.global_step"}),
        "Policy.generate": stage("generate", "rollout"),
        "Base.score": stage("score", "trainer"),
        "Base.update_actor": stage("update_actor", "actor", rank="self.rank"),
        "Trainer.evaluate": ("span", {"stage": "evaluate", "role": "trainer", "whole": True}),
    }
    assert {hook.module for hook in hooks.values()} == {"mytrainer.loop"}
    assert "# self.state.global_step was 1 in the first call, and grew by 1 with each.\n" in text


def test_a_step_that_is_several_calls_of_a_method(new: Any, tmp_path: Path) -> None:
    """The method that makes them is the loop, so that the last step ends."""
    write_package(tmp_path, "self._collect(batch); self.update_actor(batch)")
    hooks, _ = new("mytrainer", "-m", "mytrainer.main")
    assert hooks["Trainer._collect"].behaviour == "step.begin"
    assert hooks["Trainer.train_epoch"].behaviour == "step.loop"
    assert behaviours(hooks)["Policy.generate"] == stage("generate", "rollout")


def test_a_step_that_calls_the_method_of_its_base_class(new: Any, tmp_path: Path) -> None:
    """The base class's method is no stage, though its name stands for one."""
    write_package(tmp_path, "self.training_step(batch)")
    hooks, _ = new("mytrainer", "-m", "mytrainer.main")
    assert hooks["Trainer.training_step"].behaviour == "step.wrap"
    assert set(hooks) == {"Trainer.training_step", "Policy.generate", "Base.update_actor", "Trainer.evaluate"}


def test_coroutines(new: Any, tmp_path: Path) -> None:
    """A coroutine's seconds include its waits, and a task belongs to the call that created it."""
    (tmp_path / "job.py").write_text(ASYNC)
    hooks, text = new("job", "job.py")
    assert behaviours(hooks) == {
        "Runner.one_round": ("step.wrap", {"number": "index"}),
        "Runner.generate": stage("generate", "rollout"),
        "Runner.score": stage("score", "trainer"),
    }
    assert "# 5 calls, 10.00 s: 25% of the steps' time." in text


def test_ctrl_c_stops_a_command_and_its_workers(new: Any, tmp_path: Path) -> None:
    """Functions of its workers that have a kind are stages."""
    (tmp_path / "train.py").write_text(WORKERS)
    hooks, text = new("train", "train.py")
    assert hooks["Trainer.train_step"].behaviour == "step.wrap"
    assert behaviours(hooks)["compute_score"] == stage("compute_score", "reward")
    assert "from a measurement of" in text
    rest = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False).stdout
    assert not rest


def test_an_installed_package_is_measured_if_it_is_named(new: Any, tmp_path: Path, draft: Autoprof) -> None:
    write_package(tmp_path / "site-packages", "self._run_batch(batch)")
    (tmp_path / "run.py").write_text(MAIN)
    done = draft("--", sys.executable, "run.py")
    assert done.returncode == 1
    assert "none of the 1 measured function of run.py was called 3 times or more" in done.stderr
    assert "with --package" in done.stderr
    hooks, _ = new("mytrainer", "run.py", options=("--package", "mytrainer"))
    assert hooks["Trainer._run_batch"].behaviour == "step.wrap"


@pytest.mark.parametrize(
    ("program", "options", "status", "text"),
    [
        ("raise SystemExit(3)", (), 1, "the command failed with status 3 after"),
        ("def f(): ...\nf()", (), 1, "and none of the 1 measured function of job.py was called 3 times or more"),
        ("def f(): ...\nfor _ in range(9): f()", (), 1, "run more steps, or name an installed package"),
        ("import time\nwhile True: time.sleep(1)", ("--seconds", "1"), 1, "raise --seconds"),
        (LOOP + "    raise SystemExit(4)", (), 0, "the command failed with status 4 after"),
        (LOOP, ("-o", "other.toml"), 1, "other.toml: the recipe is for job; name it job.mine.toml"),
    ],
)
def test_programs_without_a_recipe(
    program: str, options: tuple[str, ...], status: int, text: str, tmp_path: Path, draft: Autoprof
) -> None:
    (tmp_path / "job.py").write_text(program)
    done = draft(*options, "--", sys.executable, "job.py")
    assert (done.returncode, bool(done.stdout)) == (status, status == 0)
    assert text in done.stderr


def test_commands_that_are_not_measured(draft: Autoprof) -> None:
    done = draft()
    assert (done.returncode, done.stdout) == (2, "")
    assert "no command was given; write autoprof recipes --new -- python train.py" in done.stderr
    done = draft("--", "no-such-command")
    assert done.returncode == 127
    done = draft("--", sys.executable, "-I", "-c", "pass")
    assert done.returncode == 1
    assert "the command (status 0) ran no Python that was measured" in done.stderr


def test_the_programs_output_and_sitecustomize_stay(tmp_path: Path, draft: Autoprof) -> None:
    """The recipe alone goes to standard output."""
    (tmp_path / "site-packages" / "sitecustomize.py").write_text(
        "import sys; print('own sitecustomize', file=sys.stderr)"
    )
    (tmp_path / "train.py").write_text(LOOP + "    print('done')")
    done = draft("--", sys.executable, "train.py")
    assert msgspec.toml.decode(done.stdout)["target"] == "train"
    assert done.stderr.index("own sitecustomize") < done.stderr.index("done")


STRANGERS = {
    "base class": BASE_CLASS,
    "methods by reference": REFERENCES,
    "coroutines": TASKS,
    "generator": GENERATOR,
    "plain script": SCRIPT,
    "spawned worker": SPAWNING,
}


@pytest.mark.parametrize("program", [pytest.param(text, id=name) for name, text in STRANGERS.items()])
def test_the_recipe_gives_the_seconds_of_the_programs_own_timers(tmp_path: Path, program: str) -> None:
    (tmp_path / "timers.py").write_text(TIMERS)
    (tmp_path / "base.py").write_text(BASE)
    (tmp_path / "train.py").write_text(program)
    command = [sys.executable, "train.py"]
    text = autoprof("recipes", "--new", "--", *command, cwd=tmp_path, PYTHONPATH=str(ROOT)).stdout
    if program is REFERENCES:
        assert re.search(r"\n# Not chosen\..*\n# train.py:Learner.phase: 18 calls, 0.\d\d s\n", text), text
    (name,) = re.findall(r"Save the file as (\S+),", text)
    (tmp_path / name).write_text(text)
    runs = tmp_path / "runs"
    settings = {"AUTOPROF_RECIPES": name, "AUTOPROF_STEPS": "", "AUTOPROF_DIR": str(runs), "PYTHONPATH": str(ROOT)}
    done = helpers.run(command, cwd=tmp_path, check=True, AUTOPROF="1", **settings)
    seconds, calls = json.loads(done.stdout.splitlines()[-1])
    seen: dict[str, list[float]] = {}
    for file in journals(runs / "latest"):
        for span in SpanReader().spans(file):
            seen.setdefault(span.name, []).append((span.end_ns - span.start_ns) / 1e9)
    assert len(seen.pop("step")) == 6
    assert seen.keys() == calls.keys() - {"step"}
    for stage, durations in seen.items():
        assert len(durations) == calls[stage]
        assert sum(durations) == pytest.approx(seconds[stage], abs=0.05), stage


def test_packages_of_a_target_folder_are_not_measured(new: Any, tmp_path: Path) -> None:
    (tmp_path / "target" / "library-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "target" / "library.py").write_text("def compare(): work(1)\nfrom clock import work\n")
    program = "import sys\nsys.path.append('target')\nfrom library import compare\n" + LOOP.replace(
        "    rows = load()", "    for _ in range(99): compare()\n    rows = load()"
    )
    (tmp_path / "train.py").write_text(program.replace("'target'", f"{str(tmp_path / 'target')!r}"))
    hooks, text = new("train", "train.py")
    assert "generate" in hooks
    assert "compare" not in text


def test_a_function_of_each_action_begins_no_step(new: Any, tmp_path: Path) -> None:
    """As in CleanRL's scripts: only `get_value` is called once per round."""
    (tmp_path / "train.py").write_text(ACTIONS)
    hooks, text = new("train", "train.py")
    assert {attribute: hook.behaviour for attribute, hook in hooks.items()} == {"Agent.get_value": "step.begin"}
    assert "each step begins in the middle of a round: 6 calls" in text
    assert "# train.py:Env.step: 192 calls, 1.92 s\n" in text
