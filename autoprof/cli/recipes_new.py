"""`autoprof recipes --new`: runs a command, measures its functions, and proposes a recipe for its steps and stages."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from autoprof import _boot
from autoprof.base import units
from autoprof.cli import recipes_catalog, recipes_measure
from autoprof.cli.console import complain
from autoprof.cli.run import not_run
from autoprof.config import values
from autoprof.hooks.recipe import script

SECONDS = 60
# Minimum number of calls of a repeated function.
_MIN_CALLS = 3
# Minimum duration of a step in seconds.
_MIN_STEP = 1e-3
# Minimum shares: of the loop in the measured time; of a stage without a kind in the steps' time; of a stage with a kind
# in the steps' time.
_MIN_LOOP, _MIN_STAGE, _MIN_KIND = 0.01, 0.03, 0.001
# Minimum share of a function in the loop's time if the function is the whole step.
_WHOLE_STEP = 0.9
_MAX_STAGES = 12
# Maximum number of calls of a stage in a step. Each call of a stage in a captured step is a trace.
_MAX_STAGE_CALLS = 16
# Minimum share of a function in the steps' time, and maximum number of functions, that are listed as not chosen.
_MIN_LISTED, _MAX_LISTED = 0.01, 12
# If the function that takes most of a loop's time is called this many times as often as another function of the loop,
# the other function is called once per step.
_MANY_CALLS = 8
# Names of functions that a loop does not call in each step.
_OCCASIONAL = re.compile(r"(?i)log|eval|valid|save|checkpoint|print|plot|record|report|dump|target|sync|schedul")
# Patterns of the names of functions that are one step, and of the attributes and parameters that count steps.
_STEP = re.compile(
    r"_*((do|run|fit|one|single|ppo|grpo|rl|async|make)_)*((train|training|learn)_)?((one|single)_)?"
    r"(step|iteration|iter)(_once)?"
)
_ENVIRONMENT = re.compile(r"(?i)(^|[._])(vec_?)?envs?([._]|$)|environment|[a-z]Env([._]|$)|optim|scheduler")
_COUNTER = re.compile(r"(^|_)(steps?|iterations?|iter|updates?)(_|$)")
# The role of a stage, by the kind of the stage.
_ROLES = {
    "generate": "rollout",
    "reward": "reward",
    "log_prob": "actor",
    "ref_log_prob": "ref",
    "values": "critic",
    "update_actor": "actor",
    "update_critic": "critic",
    "optimizer": "actor",
    "weight_sync": "actor",
}
# Signals that end the command, each with the seconds to wait until the command has ended.
_SIGNALS = ((signal.SIGINT, 10), (signal.SIGTERM, 5), (signal.SIGKILL, 5))
_SITE = """import importlib.util, sys
sys.path[:] = [path for path in sys.path if path != {folder!r}]
sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize
except ImportError as error:
    if error.name != "sitecustomize":
        raise
finally:
    spec = importlib.util.spec_from_file_location("autoprof_measure", {measure!r})
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.Measurement({folder!r}, {packages!r})
"""


def run(command: list[str], output: str | None, seconds: float, packages: list[str]) -> int:
    """Measure a command for at most `seconds`, and write the proposed recipe. Return the exit status.

    The recipe goes to the file `output`, or to standard output if no file is given.
    """
    if not command:
        return complain("recipes: --new: no command was given; write autoprof recipes --new -- python train.py", 2)
    with tempfile.TemporaryDirectory(prefix="autoprof-new-", ignore_cleanup_errors=True) as folder:
        text = _SITE.format(folder=folder, measure=recipes_measure.__file__, packages=packages)
        Path(folder, "sitecustomize.py").write_text(text, encoding="utf-8")
        complain(f"measuring for at most {seconds:g} s; Ctrl-C stops earlier. The program runs slower meanwhile.", 0)
        start_s = time.monotonic()
        try:
            status = _run(command, folder, seconds)
        except OSError as error:
            return not_run("recipes: --new", command[0], error)
        duration_s = time.monotonic() - start_s
        processes = _read_measurements(Path(folder))
    steps = [step for process in processes if (step := _step(process)) is not None]
    if not steps:
        return complain(f"recipes: --new: {_nothing(processes, status, duration_s)}", 1)
    if status:
        complain(
            f"the command failed with status {status} after {duration_s:.0f} s; the recipe has what it did before", 0
        )
    draft = _Draft(max(steps, key=lambda step: step.seconds), processes)
    recipe = draft.text(" ".join(shlex.join(command).split()), duration_s)  # a comment is one line
    if output is None:
        print(recipe, end="")
        return 0
    Path(output).write_text(recipe, encoding="utf-8")
    name = f"{'+'.join(draft.targets)}.mine.toml"
    if Path(output).name.partition(".")[0] != "+".join(draft.targets):
        return complain(f"recipes: --new: {output}: the recipe is for {', '.join(draft.targets)}; name it {name}", 1)
    return complain(f"wrote {output}; try it: autoprof recipes --try {output} -- {shlex.join(command)}", 0)


def _run(command: list[str], folder: str, seconds: float) -> int | None:
    """Run a command for at most `seconds`.

    Return the exit status as shells do (128 + N after signal N). Return None if the command was stopped.
    """
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    environ = os.environ | {"PYTHONPATH": path, _boot.ENABLE: "0"}
    # The command gets its own session, so that a signal reaches all processes of the command, and no others.
    process = subprocess.Popen(command, env=environ, stdout=sys.stderr, start_new_session=True)
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        status = process.wait(timeout=seconds)
        return status if status >= 0 else 128 - status
    for number, patience in _SIGNALS:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(timeout=patience)
            break
    return None


class _Calls(NamedTuple):
    """Calls of a function by another function.

    Attributes:
        number: The number of calls.
        seconds: The seconds of all calls together.
        runs: The number of runs of calls. Between the calls of a run, the caller calls no other function.
    """

    function: _MeasuredFunction
    number: int
    seconds: float
    runs: int


class _MeasuredFunction(msgspec.Struct, eq=False):
    """A measured function, with the values that `recipes_measure.py` writes.

    Attributes:
        callers: For each function that calls this function: its index, the number of calls, their seconds, and the
            number of runs of calls.
        called: The calls that this function makes, by function.
    """

    module: str
    attribute: str
    name: str
    calls: int
    seconds: float
    first: float
    last: float
    overlaps: int
    samples: list[dict[str, int]]
    has_rank: bool
    callers: list[tuple[int, int, float, int]]
    called: list[_Calls] = []

    @property
    def kind(self) -> str:
        """Return the kind of stage that the function's name stands for, or an empty string."""
        return values.kind_of(self.name.strip("_"))

    @property
    def target(self) -> str:
        """Return the target of a recipe that hooks the function."""
        return script(self.module) or self.module.partition(".")[0]

    @property
    def is_step(self) -> bool:
        """Return True if the function's name is a name for one step, such as `train_step`.

        The step of an environment is one action of a rollout.
        """
        return _STEP.fullmatch(self.name) is not None and not _ENVIRONMENT.search(f"{self.module}.{self.attribute}")

    @property
    def calls_functions_of_callers(self) -> bool:
        """Return True if each call calls one of several functions, as `self.phase("improve", self.improve)` does."""
        called = [calls.number for calls in self.called if calls.seconds >= 0.01 * self.seconds]
        return len(called) > 1 and max(called) <= self.calls / 2 and abs(sum(called) - self.calls) <= 1

    def callees(self, outer_functions: tuple[_MeasuredFunction, ...] = ()) -> Iterator[_Calls]:
        """Yield the calls that this function makes, by function.

        A hook can't name a nested function. Therefore the functions that a nested function calls take its place. The
        same applies to a function that calls the functions that its callers name.
        """
        for calls in self.called:
            if calls.function.attribute and not calls.function.calls_functions_of_callers:
                yield calls
            elif calls.function not in (*outer_functions, self):
                yield from calls.function.callees((*outer_functions, self))


class _MeasuredProcess(msgspec.Struct):
    """The functions of one process, and the seconds for which it was measured."""

    seconds: float
    functions: list[_MeasuredFunction]


class _Step(msgspec.Struct):
    """The steps of a process, and the functions with which a step begins and ends.

    Attributes:
        function: The function that is one step, or the first function that each step calls.
        last: The last function that each step calls; None if it is `function`.
        loop: The function that runs all steps.
        is_whole: True if `function` is the whole step.
        is_late: True if the loop calls other functions in each step before `function`.
        other_calls: The number of calls of `function` by other functions than the loop.
        seconds: Seconds of all steps together.
    """

    process: _MeasuredProcess
    function: _MeasuredFunction
    loop: _MeasuredFunction
    is_whole: bool
    calls: int
    seconds: float
    last: _MeasuredFunction | None = None
    is_late: bool = False
    other_calls: int = 0


def _read_measurements(folder: Path) -> list[_MeasuredProcess]:
    processes = [
        msgspec.json.decode(path.read_bytes(), type=_MeasuredProcess) for path in sorted(folder.glob("*.json"))
    ]
    for process in processes:
        for function in process.functions:
            for caller, number, seconds, runs in function.callers:
                process.functions[caller].called.append(_Calls(function, number, seconds, runs))
    return processes


def _step(process: _MeasuredProcess) -> _Step | None:
    """Return the steps of a process: the repeated calls that take most of the time.

    Return None if no function was repeated, or if the repeated calls are too short.
    """
    loops = []
    for caller in process.functions:
        repeated = [
            calls
            for calls in caller.callees()
            if calls.number >= _MIN_CALLS * max(1, caller.calls)
            and not calls.function.overlaps
            and not _is_epoch(calls.function)
        ]
        if repeated:
            loops.append((sum(calls.seconds for calls in repeated), caller, repeated))
    if not loops:
        return None
    longest_s = max(seconds for seconds, *_ in loops)
    if longest_s < _MIN_LOOP * process.seconds:
        return None
    # A loop that calls a function with the name of a step is preferred to the loops around it.
    seconds, caller, repeated = max(
        (loop for loop in loops if loop[0] >= longest_s / 2),
        key=lambda loop: (any(calls.function.is_step for calls in loop[2]), loop[0]),
    )
    named_steps = [calls for calls in repeated if calls.function.is_step and calls.seconds >= seconds / 2]
    main = max(named_steps or repeated, key=lambda calls: calls.seconds)
    if main.seconds < _MIN_STEP * main.number:
        return None
    if main.seconds >= _WHOLE_STEP * (main.function.last - main.function.first):
        return _Step(process, main.function, caller, True, main.number, main.seconds)
    return _step_of_calls(process, caller, repeated, main, seconds)


def _is_epoch(function: _MeasuredFunction) -> bool:
    """Return True if the function is an epoch, which has several steps."""
    return "epoch" in function.name and any(
        calls.number >= _MIN_CALLS * max(1, function.calls) for calls in function.callees()
    )


def _rounds(repeated: list[_Calls], main: _Calls) -> int:
    """Return the number of rounds of a loop in which the function of `main` takes most of the time.

    If each round calls that function several times, the number comes from the runs of these calls, or from another
    function that the loop calls.
    """
    if _MIN_CALLS <= main.runs <= main.number / 2:
        return main.runs
    others = [calls.number for calls in repeated if not _OCCASIONAL.search(calls.function.name)]
    fewest = min(others, default=main.number)
    return fewest if main.number >= _MANY_CALLS * fewest else main.number


def _step_of_calls(
    process: _MeasuredProcess, loop: _MeasuredFunction, repeated: list[_Calls], main: _Calls, seconds: float
) -> _Step:
    """Return the steps of a loop that calls several functions in each step.

    A function that other functions call too, such as a timer, would begin a step with each of these calls. So functions
    that only the loop calls are preferred.
    """
    rounds = _rounds(repeated, main)
    once_per_round = [calls for calls in repeated if abs(calls.number - rounds) <= 1] or [main]
    only_of_loop = [calls for calls in once_per_round if calls.function.calls <= calls.number]
    first = min(only_of_loop or once_per_round, key=lambda calls: (calls.function.first, -calls.number))
    last = max(only_of_loop or once_per_round, key=lambda calls: calls.function.first)
    return _Step(
        process,
        first.function,
        loop,
        False,
        first.number,
        seconds,
        last=last.function if last is not first else None,
        is_late=any(
            calls.function.first < first.function.first and calls.number >= rounds and calls.seconds >= 0.01 * seconds
            for calls in repeated
        ),
        other_calls=first.function.calls - first.number,
    )


def _nothing(processes: list[_MeasuredProcess], status: int | None, took_s: float) -> str:
    """Return a message with the reason why no recipe can be proposed, and with a remedy."""
    if not processes:
        return f"the command (status {status}) ran no Python that was measured; start python without -I, -E or -S"
    if status:
        return f"the command failed with status {status} after {took_s:.1f} s, before a function was repeated"
    functions = [function for process in processes for function in process.functions if function.attribute]
    modules = sorted({function.module for function in functions})
    subject = f"the {units.count(len(functions), 'measured function')} of {', '.join(modules) or 'the command'}"
    ended = "the command ended" if status == 0 else "the time was over"
    remedy = "run more steps" if status == 0 else "raise --seconds"
    return (
        f"{ended} after {took_s:.1f} s, and none of {subject} was called {_MIN_CALLS} times or more for a noticeable "
        f"time; {remedy}, or name an installed package that has the steps with --package"
    )


class _Draft:
    """The hooks that a new recipe will contain, derived from the measured steps."""

    def __init__(self, step: _Step, processes: list[_MeasuredProcess]) -> None:
        self._step, self._processes = step, processes
        self._hooks: list[tuple[_MeasuredFunction, str, dict[str, Any]]] = []
        self._known = {hook.key for hook in recipes_catalog.own_hooks()}
        self._add_step()
        for calls in self._stages(processes):
            self._add_stage(calls)

    @property
    def targets(self) -> list[str]:
        """Return the targets of the hooks. The target of the step's hook comes first."""
        return list(dict.fromkeys(function.target for function, *_ in self._hooks))

    def _add_step(self) -> None:
        step = self._step
        options, number = _number(step.function)
        name, behaviour, meaning = "step", "step.wrap", "One call is one step"
        if not step.is_whole:
            name, behaviour, meaning = "step-begin", "step.begin", "It is the first call of each step"
        if step.is_late:
            meaning = "It is called once in each round, but not first: each step begins in the middle of a round"
            number += " Better: move the body of the loop into a function, and use step.wrap."
        if step.other_calls:
            number += f" Other functions call it {units.count(step.other_calls, 'time')}; these calls begin steps, too."
        duration_text = f"The steps took {step.seconds:.2f} s of {step.process.seconds:.2f} s."
        comment = f"{meaning}: {units.count(step.calls, 'call')}. {duration_text}\n{number}"
        if not step.is_whole and not step.loop.attribute and step.last is None:
            comment += "\nThe last step has no end: its loop is not in a function that a hook can name."
        self._add(name, step.function, behaviour, comment, options=options)
        if not step.is_whole and step.loop.attribute:
            self._add("loop", step.loop, "step.loop", "It makes all steps, so the last step ends with it.")
        elif step.last is not None:
            end_text = "It is the last call of each step. What the loop does after it belongs to no step."
            self._add("step-end", step.last, "step.end", end_text)

    def _stages(self, processes: list[_MeasuredProcess]) -> list[_Calls]:
        """Return the calls of the functions that become stages, in the order of their first calls."""
        step = self._step
        top = step.function if step.is_whole else step.loop
        step_calls = [calls for calls in top.callees() if calls.function.last > step.function.first]
        stages = _stages(step, step_calls, {top})
        # Add functions with a kind that the step does not call: functions of workers, validation and checkpoints.
        outside_kinds = {"validate", "checkpoint"} - {calls.function.kind for calls in stages}
        stages += [
            _Calls(function, function.calls, function.seconds, function.calls)
            for process in processes
            for function in process.functions
            if function.attribute and function.calls and function.kind
            if (process is not step.process or function.kind in outside_kinds)
            and function.seconds > _MIN_KIND * step.seconds
        ]
        stages = [calls for calls in stages if calls.number <= _MAX_STAGE_CALLS * step.calls]
        longest_by_place: dict[tuple[str, str], _Calls] = {}
        for calls in sorted(stages, key=lambda calls: -calls.seconds):
            longest_by_place.setdefault((calls.function.module, calls.function.attribute), calls)
        return sorted([*longest_by_place.values()][:_MAX_STAGES], key=lambda calls: calls.function.first)

    def _add_stage(self, calls: _Calls) -> None:
        function, number, seconds, _ = calls
        share = f"{seconds / self._step.seconds:.0%} of the steps' time"
        comment = f"{units.count(number, 'call')}, {seconds:.2f} s: {share}."
        options: dict[str, Any] = {"stage": function.name.strip("_"), "role": _ROLES.get(function.kind, "trainer")}
        if function.kind == "validate":
            options["whole"] = True
        elif function.has_rank:
            options["rank"] = "self.rank"
        behaviour = "span" if function.kind == "validate" else "stage"
        name = re.sub("[^A-Za-z0-9]+", "-", function.name).strip("-") or "stage"
        self._add(name, function, behaviour, comment, kind=function.kind, options=options)

    def _add(self, name: str, function: _MeasuredFunction, behaviour: str, comment: str, **keys: Any) -> None:
        used_names = {table["name"] for other, _, table in self._hooks if other.target == function.target}
        while name in used_names or f"{function.target}/{name}" in self._known:
            name = f"my-{name}"
        table = {"name": name, "module": function.module, "attribute": function.attribute, "behaviour": behaviour}
        self._hooks.append((function, comment.strip(), table | {key: value for key, value in keys.items() if value}))

    def text(self, command: str, took: float) -> str:
        """Return the text of the recipe file."""
        name = f"{'+'.join(self.targets)}.mine.toml"
        lines = [
            f"# A first recipe, from a measurement of {took:.0f} s: {command}",
            f"# Review each hook. Save the file as {name}, and try it:",
            f"# autoprof recipes --try {name} -- {command}",
        ]
        several = len(self.targets) > 1
        for target in self.targets:
            lines += ["[[recipe]]", f"target = {json.dumps(target)}", ""] if several else [f'target = "{target}"', ""]
            for function, comment, table in self._hooks:
                if function.target == target:
                    lines += [*(f"# {line}" for line in comment.splitlines()), f"[[{'recipe.' * several}hook]]"]
                    lines += [f"{key} = {_toml(value)}" for key, value in table.items()] + [""]
        return "\n".join([*lines, *self._not_chosen()]).rstrip() + "\n"

    def _not_chosen(self) -> list[str]:
        """Return comments with the measured functions that have no hook, longest first."""
        chosen = {(function.module, function.attribute) for function, *_ in self._hooks}
        functions: dict[tuple[str, str], tuple[float, int]] = {}
        for function in (function for process in self._processes for function in process.functions):
            place = function.module, function.attribute
            if function.attribute and place not in chosen and function.calls >= _MIN_CALLS:
                seconds, calls = functions.get(place, (0.0, 0))
                functions[place] = seconds + function.seconds, calls + function.calls
        longest = sorted(functions.items(), key=lambda item: -item[1][0])[:_MAX_LISTED]
        rows = [
            f"# {module}:{attribute}: {units.count(calls, 'call')}, {seconds:.2f} s"
            for (module, attribute), (seconds, calls) in longest
            if seconds >= _MIN_LISTED * self._step.seconds
        ]
        return ["# Not chosen. For another stage, copy a hook with its module and attribute:", *rows] if rows else []


def _stages(step: _Step, all_calls: Iterable[_Calls], seen: set[_MeasuredFunction]) -> list[_Calls]:
    """Return the calls of the functions that become stages, among `all_calls` and the calls inside them.

    A stage is a function with a kind, or a function that takes long. `seen` has the functions examined before.
    """
    stages = []
    for calls in all_calls:
        function = calls.function
        if function in seen or calls.seconds < _MIN_KIND * step.seconds:
            continue
        seen.add(function)
        # A whole step has stages, even if its name stands for a kind, such as a base class's `training_step`.
        has_kind = function.kind and not function.is_step
        inner = [] if has_kind else _stages(step, function.callees(), seen)
        has_inner_kind = any(inner_calls.function.kind for inner_calls in inner)
        if has_inner_kind or (calls.seconds >= _WHOLE_STEP * step.seconds and len(inner) > 1):
            stages += inner
        elif has_kind or calls.seconds >= _MIN_STAGE * step.seconds:
            stages.append(calls)
    return stages


def _number(function: _MeasuredFunction) -> tuple[dict[str, Any], str]:
    """Return the options that name the step's number in a recipe, and a comment about the number.

    The number is an integer that grew by 1 with each call of `function`. Without such an integer, return no options.
    """
    samples = function.samples
    counters = [
        path
        for path, value in (samples[0] if len(samples) >= _MIN_CALLS else {}).items()
        if [sample.get(path) for sample in samples] == list(range(value, value + len(samples)))
    ]
    counters.sort(key=lambda path: (not _COUNTER.search(path.rpartition(".")[2]), path.count(".")))
    if not counters:
        return {}, "No argument or attribute of self counted the calls, so steps are counted from 1."
    path = counters[0]
    if samples[0][path] == 0 and "." in path:
        return {"number": path, "offset": 1}, f"{path} was 0 in the first call, so it has the number of finished steps."
    return {"number": path}, f"{path} was {samples[0][path]} in the first call, and grew by 1 with each."


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {json.dumps(item)}' for key, item in value.items())} }}"
    return json.dumps(value)
