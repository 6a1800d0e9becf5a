"""Exceptions of the user's signal handlers that interrupt autoprof's code."""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import errno
import functools
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import autoprof
from autoprof.base import files, log, originals, seam
from autoprof.hooks import registry
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call
from autoprof.hooks.wrapper import wrap
from tests.support.helpers import TORCH, Python
from tests.support.recipe_texts import recipe


class Alarm(Exception):
    """Exception of a watchdog."""


@dataclasses.dataclass(frozen=True)
class FrozenAlarm(Alarm):
    """Exception whose attributes can't be set."""


def handler(number: int, frame: FrameType | None) -> None:
    raise Alarm


def frozen(number: int, frame: FrameType | None) -> None:
    raise FrozenAlarm


class Handlers:
    def method(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        raise Alarm

    def __call__(self, *given: Any) -> None:
        raise TimeoutError("the user's")


def chained(*_: Any) -> None:
    try:
        raise KeyError("inside of the handler")
    except KeyError as error:
        raise Alarm from error


def list_of_walk(path: str) -> list[object]:
    return list(files.walk(path))


HANDLERS = [
    handler,
    Handlers().method,
    Handlers(),
    chained,
    frozen,
    functools.partial(lambda more, number, frame: handler(number, frame), "more"),
]


@pytest.fixture
def alarm() -> Iterator[Callable[[Any], None]]:
    """Yield a function that sets the handler of SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler) and None
    signal.signal(signal.SIGUSR1, before)


class Interrupted(Behaviour):
    """Behaviour that is interrupted before or after the call, in a clause that catches all other exceptions."""

    after: bool

    def around(self, call: Call) -> Around:
        self.work(not self.after)
        yield CALL
        self.work(self.after)
        return None

    def work(self, now: bool) -> None:
        try:
            raise KeyError("autoprof's own")
        except KeyError:
            try:
                if now:
                    signal.raise_signal(signal.SIGUSR1)
            except Exception as error:
                seam.pass_on(error)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("raises", HANDLERS, ids=range(len(HANDLERS)))
@pytest.mark.fault("a signal handler raises in autoprof's code", "as without autoprof", "what was being recorded")
def test_what_a_handler_raises_reaches_the_user(behave: Any, alarm: Any, raises: Any, after: bool) -> None:
    alarm(raises)
    behave(Interrupted(after=after))
    function = wrap(lambda: 7, "k")
    for _ in range(2 * registry.FAILURES):
        with pytest.raises((Alarm, TimeoutError)) as caught:
            function()
        inner = caught.value.__context__
        assert inner is None or "inside of the handler" in str(inner)
        assert inner is None or inner.__context__ is None
    assert not registry.gate("k")


def test_what_the_user_was_handling_stays_the_context(behave: Any, alarm: Any) -> None:
    alarm(handler)
    behave(Interrupted(after=False))

    def interrupted() -> None:
        try:
            raise ValueError("the user's own")
        except ValueError:
            wrap(lambda: 7, "k")()

    with pytest.raises(Alarm) as caught:
        interrupted()
    assert str(caught.value.__context__) == "the user's own"


def test_errors_of_autoprofs_own_are_not_taken_for_a_handlers(behave: Any, alarm: Any) -> None:
    alarm(handler)

    class Fails(Behaviour):
        def around(self, call: Call) -> Around:
            def looks_like_one(number: int, frame: object) -> None:
                raise RuntimeError("autoprof's own")

            looks_like_one(1, None)
            yield CALL
            return None

    behave(Fails())
    try:
        signal.raise_signal(signal.SIGUSR1)
    except Alarm:  # it is handled when autoprof fails, and is the context of that
        assert wrap(lambda: 7, "k")() == 7


def test_suppress_lets_a_handlers_exception_out(alarm: Any) -> None:
    alarm(Handlers())
    with seam.suppress(OSError):
        raise OSError
    with pytest.raises(TimeoutError), seam.suppress(OSError):
        signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize("work", [files.exists, files.is_folder, files.is_file, files.remove, files.size, list_of_walk])
def test_a_handlers_exception_is_no_missing_file(
    alarm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, work: Callable[[str], object]
) -> None:
    alarm(Handlers())
    (tmp_path / "folder").mkdir()
    for name in ("access", "stat", "scandir"):
        monkeypatch.setattr(originals.os, name, lambda *_, **__: signal.raise_signal(signal.SIGUSR1))
    with pytest.raises(TimeoutError):
        work(str(tmp_path))


def test_a_handlers_exception_leaves_the_removal_of_a_folder(
    alarm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    alarm(Handlers())
    (tmp_path / "file").touch()
    monkeypatch.setattr(originals.os, "unlink", lambda *_, **__: signal.raise_signal(signal.SIGUSR1))
    with pytest.raises(TimeoutError):
        files.remove(str(tmp_path))


def test_a_folder_is_removed_as_far_as_the_system_allows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "kept").touch()

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "refused")

    monkeypatch.setattr(originals.os, "unlink", refused)
    files.remove(str(folder))
    assert [path.name for path in folder.iterdir()] == ["kept"]


# Exception that a library raises instead of the one that it caught, as urllib does for errors of the system.
def test_a_handlers_exception_that_a_library_has_wrapped_is_found(alarm: Any) -> None:
    alarm(Handlers())

    def library() -> None:
        try:
            signal.raise_signal(signal.SIGUSR1)
        except OSError as error:
            raise RuntimeError("wrapped") from error

    with pytest.raises(TimeoutError), seam.suppress(RuntimeError):
        library()
    with pytest.raises(TimeoutError), seam.guard("reading", log.error_once):
        library()


def test_a_guard_ends_autoprofs_own_error_and_reports_it_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with seam.guard("the step can't be announced", log.error_once) as announcement:
            raise KeyError("step")
        assert announcement.failed
    assert [record.message for record in caplog.records] == ["the step can't be announced: KeyError: 'step'"]


def test_a_guard_reports_to_its_own_function() -> None:
    reports = []
    with seam.guard("reading", lambda what, error: reports.append((what, type(error)))):
        raise OSError("no disk")
    assert reports == [("reading", OSError)]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_guard_passes_exceptions_that_are_not_errors(kind: type[BaseException]) -> None:
    with pytest.raises(kind), seam.guard("reading", log.error_once):
        raise kind


# All builtin exceptions that a handler may raise, except the ends of iterators.
BROAD = {
    name
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, BaseException)
    and not issubclass(kind, (Warning, StopIteration, StopAsyncIteration))
}
# Code of separate processes: the command line, and readers of a finished run. And `seam` itself.
READERS = ("cli/", "report/", "traces/", "rundir/runs.py", "rundir/file_names.py")
READERS += ("run/fetch.py", "run/gather.py", "run/upload.py", "run/cluster.py", "run/node_functions.py")
READERS += ("capture/finisher.py", "base/seam.py")
# These decide themselves: see `_is_own_error` in `_boot`, and the wrapper that is pickled by value in `dispatch`.
SEAMS = ("hooks/dispatch.py", "_boot/__init__.py")


# These catch every OSError. `files.status` and similar functions raise the exceptions of handlers.
ASKS = {f"os.path.{name}" for name in ("exists", "lexists", "isfile", "isdir", "islink")}
# Only the main thread runs signal handlers. `_boot` may not import `files` (docs/limits.md).
OTHER_THREADS = ("run/watcher.py", "run/stacks.py", "run/snapshot.py")
BEFORE = ("_boot/",)


def _loses_errors(call: ast.Call) -> bool:
    name, named = ast.unparse(call.func), {keyword.arg for keyword in call.keywords}
    return name in ASKS or (name == "os.walk" and "onerror" not in named) or "ignore_errors" in named


def swallowed() -> Iterator[str]:
    root = Path(autoprof.__file__).parent
    for path in sorted(root.rglob("*.py")):
        inner = str(path.relative_to(root))
        if inner.startswith((*READERS, *SEAMS)):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            place = f"{inner}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ExceptHandler):
                kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                broad = BROAD & {ast.unparse(kind).rpartition(".")[2] if kind else "Exception" for kind in kinds}
                raised = any(isinstance(each, ast.Raise) and each.exc is None for each in node.body)
                first = ast.unparse(node.body[0])
                passed_on = first.startswith(
                    (
                        "seam.pass_on(",
                        "_reraise_if_from_handler(",
                        "if (theirs := sys.modules.get('autoprof.base.seam')",
                        "if (seam := sys.modules.get('autoprof.base.seam')",
                    )
                )
                # A generator around a generator: an exception thrown into it is thrown into the inner one.
                thrown = first.endswith(("throw, error)", "throw, error"))
                over = broad <= {"StopIteration", "StopAsyncIteration"} and first.startswith("return")
                # `_boot/finder.py` raises it once it has acquired the lock.
                kept = first == f"interrupt = {node.name}"
                if broad and not (raised or passed_on or thrown or over or kept):
                    yield place
            if isinstance(node, ast.Call) and _loses_errors(node) and not inner.startswith((*OTHER_THREADS, *BEFORE)):
                yield place
            suppresses = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[0] == "contextlib"
            if suppresses and BROAD & {ast.unparse(kind).rpartition(".")[2] for kind in node.args}:
                yield place


def test_each_clause_that_catches_much_passes_on_what_a_handler_raises() -> None:
    assert list(swallowed()) == []


KINDS = """
import signal, sys
from small import Trainer
kinds = [TimeoutError, OSError, ValueError, KeyError, StopIteration, SystemExit, RuntimeError, AttributeError,
         ImportError, RecursionError, KeyboardInterrupt, FileNotFoundError, BlockingIOError, TypeError]
fired, ignored = 0, []
# Python itself ignores exceptions in the callbacks of weak references and in destructors.
sys.unraisablehook = lambda what: ignored.append(what.exc_type)
def handler(number, frame):
    global fired
    fired += 1
    raise kind("mine")
signal.signal(signal.SIGALRM, handler)
trainer = Trainer()
trainer.train_step()
wrong = []
for number in range(150):
    kind, before, lost = kinds[number % len(kinds)], fired, len(ignored)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0002 + number % 37 * 0.0005)
        while fired == before:
            trainer.train_step()
        if len(ignored) == lost:
            wrong.append((kind.__name__, "lost"))
    except BaseException as error:
        if type(error) is not kind or error.args != ("mine",) or error.__context__ or error.__cause__:
            wrong.append((kind.__name__, repr(error), repr(error.__context__)))
# The standard library itself catches some: a KeyError in `os.environ.get`, an OSError in `os.path.exists`.
print([each for each in wrong if each[1] != "lost"], len(wrong) <= 6, fired, torch.autograd._profiler_enabled())
for _ in range(3):
    trainer.train_step()
"""


WATCHDOG = """
import os, signal, sys
os.environ["AUTOPROF_RUN_ID"] = "made"
raised = caught = 0
# Python itself ignores exceptions in the callbacks of weak references and in destructors.
ignored = []
sys.unraisablehook = lambda what: ignored.append(what.exc_type)
class Own(Exception): pass
Alarm = Own
arguments = ()
def handler(number, frame):
    global raised
    raised += 1
    raise Alarm(*arguments)
signal.signal(signal.SIGALRM, handler)
from small import Trainer
trainer = Trainer()
done = 0
for number in range(4000):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.00002 + (number % 97) * 0.00002)
        trainer.train_step()
        signal.setitimer(signal.ITIMER_REAL, 0)
        done += 1
    except Alarm:
        caught += 1
signal.setitimer(signal.ITIMER_REAL, 0)
lost = raised - caught - len(ignored)
assert 0 <= lost <= MOST, (raised, caught, ignored)
assert raised > 50 and done > 50, (raised, done)
from autoprof.capture import recorder
from autoprof.hooks import registry
assert recorder.current() is None
assert not any(registry._gates.values()), registry._gates
print("equal")
"""
FIRST_IMPORT = """
import signal, sys
def handler(number, frame):
    raise TimeoutError("late")
signal.signal(signal.SIGALRM, handler)
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == NAME:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGALRM)
sys.meta_path.insert(0, Interrupts())
assert NAME not in sys.modules
try:
    import small
except TimeoutError:
    print("equal")
small = __import__("small")
small.Trainer().train_step()
"""
FROZEN = """
import dataclasses
@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    after: int = 3
Alarm = {kind}
"""
SMALL = """
class Trainer:
    number = 0
    def train_step(self):
        self.number += 1
        self.update()
    def update(self):
        sum(range(100))
"""
RECIPE = recipe(
    "small",
    ("a", "Trainer.train_step", "step.wrap", 'number = "self.number"'),
    ("b", "Trainer.update", "stage", 'stage = "update", role = "actor"'),
)


@pytest.fixture
def trained(tmp_path: Path, python: Python) -> Python:
    """Run code that can import the trainer, without captures by default."""
    (tmp_path / "small.py").write_text(SMALL)
    (tmp_path / "small.toml").write_text(RECIPE)
    on = {"AUTOPROF": "1", "AUTOPROF_STEPS": "", "AUTOPROF_RECIPES": "small.toml"}
    return lambda code, **variables: python(code, **on | variables)


@pytest.mark.fault("a watchdog's alarms at any moment", "every one reaches the user", "steps that were interrupted")
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("Own", ()),
        ("Frozen", ()),
        ("TimeoutError", ()),
        ("TimeoutError", ("late",)),
        ("TimeoutError", (errno.ETIMEDOUT, "late")),
        ("ConnectionError", ()),
        ("ConnectionError", ("lost",)),
    ],
)
def test_no_alarm_of_a_watchdog_is_lost(trained: Python, kind: str, arguments: tuple[int | str, ...]) -> None:
    code = WATCHDOG.replace("Alarm = Own", FROZEN.format(kind=kind)).replace("MOST", "0")
    code = code.replace("arguments = ()", f"arguments = {arguments}")
    # The first step imports, and an import catches every OSError (docs/limits.md).
    code = code.replace("trainer = Trainer()", "trainer = Trainer()\ntrainer.train_step()")
    result = trained(code)
    assert result.stdout == "equal\n"
    assert "error" not in result.stderr.lower()


@pytest.mark.parametrize("name", ["datetime", "typing_extensions", "msgspec", "inspect"])
def test_an_alarm_while_autoprof_imports_a_library_reaches_the_program(trained: Python, name: str) -> None:
    assert trained(FIRST_IMPORT.replace("NAME", repr(name))).stdout == "equal\n"


@pytest.mark.skipif(sys.platform != "linux", reason="timers of the process")
@pytest.mark.fault("alarms while torch records", "every one reaches the user", "captures that were interrupted")
def test_alarms_leave_no_recording_behind(trained: Python, tmp_path: Path) -> None:
    code = WATCHDOG.replace("range(4000)", "range(60)").replace("raised > 50 and done > 50", "raised > 5 and done > 5")
    code = code.replace("0.00002 + (number % 97) * 0.00002", "0.0001 + (number % 2) * 2 + (number % 31) * 0.004")
    code = code.replace("trainer = Trainer()", f"trainer = Trainer()\n{TORCH}trainer.train_step()")
    # torch and the standard library catch some exceptions themselves.
    code = code.replace("MOST", "raised // 100")
    code += "assert not torch.autograd._profiler_enabled()\n"
    result = trained(code, AUTOPROF_STEPS="::1", AUTOPROF_MAX_STEPS="1000")
    assert result.stdout == "equal\n", result.stderr
    with contextlib.suppress(FileNotFoundError):
        assert len(list((tmp_path / "autoprof_runs" / "made").glob("global_step_*"))) > 5


@pytest.mark.usefixtures("thorough")  # it is about moments, which are other ones each time
@pytest.mark.fault(
    "a handler raises whatever autoprof catches elsewhere", "it reaches the user", "what was being recorded"
)
def test_exceptions_of_any_kind_reach_the_user_from_captured_steps(trained: Python, tmp_path: Path) -> None:
    result = trained(TORCH + KINDS, AUTOPROF_STEPS="::1", AUTOPROF_MAX_STEPS="100000")
    assert result.stdout == "[] True 150 False\n", result.stderr
    metas = sorted((tmp_path / "autoprof_runs").glob("*/global_step_*/*.meta.json"), key=lambda path: path.parent.name)
    assert [json.loads(path.read_text())["state"] for path in metas[-3:]] == ["complete"] * 3
