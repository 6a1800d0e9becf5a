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
# Patterns of the names of functions that are one step, and of the attributes and parameters that count steps.
_STEP = re.compile(
    r"_*((do|run|fit|one|single|ppo|grpo|rl|async|make)_)*((train|training|learn)_)?((one|single)_)?"
    r"(step|iteration|iter)(_once)?"
)
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
    """Calls of a function: their number, and their seconds altogether."""

    function: _MeasuredFunction
    number: int
    seconds: float


class _MeasuredFunction(msgspec.Struct, eq=False):
    """A measured function, with the values that `recipes_measure.py` writes.

    Attributes:
        callers: For each function that calls this function: its index, the number of calls, and their seconds.
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
    callers: list[tuple[int, int, float]]
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
        """Return True if the function's name is a name for one step, such as `train_step`."""
        return _STEP.fullmatch(self.name) is not None

    def callees(self, outer_functions: tuple[_MeasuredFunction, ...] = ()) -> Iterator[_Calls]:
        """Yield the calls that this function makes, by function.

        A hook can't name a nested function. Therefore the functions that a nested function calls take its place.
        """
        for calls in self.called:
            if calls.function.attribute:
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
        loop: The function that runs all steps.
        is_whole: True if `function` is the whole step.
        seconds: Seconds of all steps together.
    """

    process: _MeasuredProcess
    function: _MeasuredFunction
    loop: _MeasuredFunction
    is_whole: bool
    calls: int
    seconds: float


def _read_measurements(folder: Path) -> list[_MeasuredProcess]:
    processes = [
        msgspec.json.decode(path.read_bytes(), type=_MeasuredProcess) for path in sorted(folder.glob("*.json"))
    ]
    for process in processes:
        for function in process.functions:
            for caller, number, seconds in function.callers:
                process.functions[caller].called.append(_Calls(function, number, seconds))
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
            and "epoch" not in calls.function.name
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
    first = min(
        (calls for calls in repeated if abs(calls.number - main.number) <= 1),
        key=lambda calls: (calls.function.first, -calls.number),
    )
    return _Step(process, first.function, caller, False, first.number, seconds)


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
        self._step = step
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
            if not step.loop.attribute:
                number += " The last step has no end: its loop is not in a function that a hook can name."
        duration_text = f"The steps took {step.seconds:.2f} s of {step.process.seconds:.2f} s."
        comment = f"{meaning}: {units.count(step.calls, 'call')}. {duration_text}\n{number}"
        self._add(name, step.function, behaviour, comment, options=options)
        if not step.is_whole and step.loop.attribute:
            self._add("loop", step.loop, "step.loop", "It makes all steps, so the last step ends with it.")

    def _stages(self, processes: list[_MeasuredProcess]) -> list[_Calls]:
        """Return the calls of the functions that become stages, in the order of their first calls."""
        step = self._step
        top = step.function if step.is_whole else step.loop
        step_calls = [calls for calls in top.callees() if calls.function.last > step.function.first]
        stages = _stages(step, step_calls, {top})
        # Add functions with a kind that the step does not call: functions of workers, validation and checkpoints.
        outside_kinds = {"validate", "checkpoint"} - {calls.function.kind for calls in stages}
        stages += [
            _Calls(function, function.calls, function.seconds)
            for process in processes
            for function in process.functions
            if function.attribute and function.calls and function.kind
            if (process is not step.process or function.kind in outside_kinds)
            and function.seconds > _MIN_KIND * step.seconds
        ]
        longest_by_place: dict[tuple[str, str], _Calls] = {}
        for calls in sorted(stages, key=lambda calls: -calls.seconds):
            longest_by_place.setdefault((calls.function.module, calls.function.attribute), calls)
        return sorted([*longest_by_place.values()][:_MAX_STAGES], key=lambda calls: calls.function.first)

    def _add_stage(self, calls: _Calls) -> None:
        function, number, seconds = calls
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
        return "\n".join(lines).rstrip() + "\n"


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
