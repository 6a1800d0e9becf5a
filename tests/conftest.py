"""Fixtures of all tests: an environment without autoprof's variables, and Python in child processes."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from autoprof.base import identity, process
from autoprof.capture import profilers, recorder
from autoprof.config.settings import Settings
from autoprof.hooks import behaviour as behaviours
from autoprof.hooks import registry
from autoprof.hooks.wrapper import wrap
from autoprof.run import runtime
from autoprof.run.runtime import RunInfo, Runtime
from tests.support import helpers, packages, processes, small_trainer, truth

# No deadline: the machines that run the tests may be slow and busy.
settings.register_profile(
    "autoprof", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("autoprof")


def pytest_configure() -> None:
    """Keep a copy of stderr for progress lines of real runs, since pytest captures stderr later."""
    processes.terminal = os.dup(2)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line options `--faults` and `--thorough`."""
    parser.addoption("--faults", action="store_true", help="print the table of injected faults")
    parser.addoption("--thorough", action="store_true", help="run the long real runs too, which CI skips")


class _Module(pytest.Module):
    """Module of tests, skipped if it imports a package that the environment lacks."""

    def _getobj(self) -> Any:
        try:
            return super()._getobj()
        except self.CollectError as error:
            if name := packages.lacked(error.__cause__):
                pytest.skip(packages.reason(name), allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """Create the collector of a test module."""
    return _Module.from_parent(parent, path=module_path)


# Paths of the modules that share runs of verl, and of the modules among them with runs on two devices.
_VERL = re.compile(r"tests/real/test_(verl(?!_tools|_trtllm)|faults)")
_TWO_DEVICES = re.compile(r"tests/real/test_verl_(hangs|planted|table)")
# Paths of the modules that start clusters of Ray, in which most of the time passes without work.
_RAY = re.compile(r"tests/real/test_(ray|cluster)")
# Release of an engine or of verl in a node id.
_RELEASE = re.compile(r"\b(?:sglang|trl|vllm)-[0-9.]+[0-9]|\bverl-0\.(?:[0-6]\.[0-9]|7\.0)")


def _together(nodeid: str) -> str:
    """Return the key of the tests that run in the same worker process as this one.

    Tests of one module share a worker. The tests that share runs of verl have two workers, those with clusters of Ray
    have one, and all other real tests have one, because each run starts dozens of processes. Each release of an engine
    has its own key, and so has each differential program and each program of the truth suite.

    Two runs of an older verl never overlap: from 0.7.1 on, their sockets for new weights have the same names. Runs of
    0.9.1 get other names from the import probe.
    """
    module = nodeid.partition("::")[0]
    if module.startswith(("tests/differential/", "tests/truth/")):
        return nodeid
    if module.startswith(("tests/engines/", "tests/releases/")) and (release := _RELEASE.search(nodeid)):
        return f"{module} {release[0]}"
    if _VERL.match(module):
        return "verl on two devices" if _TWO_DEVICES.match(module) else "verl"
    if module.startswith("tests/real/"):
        return "ray" if _RAY.match(module) else "real"
    return module


# Niceness of the workers with these keys. Runs on two devices have the highest priority: their tests compare durations.
_NICENESS = {"verl on two devices": 0, "verl": 1}
# Niceness of all other workers.
_BESIDE = 3


class _Scheduling(LoadScopeScheduling):
    """Scheduler that gives each worker all tests with the same key, in their order."""

    def _split_scope(self, nodeid: str) -> str:
        return _together(nodeid)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the longest tests first: runs of verl, which occupy two workers, then other real runs, then the others."""
    kinds = ["tests/real/", "tests/releases/", "tests/trainers/", "tests/engines/", "tests/differential/"]

    def order(item: pytest.Item) -> tuple[int, int]:
        kind = next((number for number, kind in enumerate(kinds) if item.nodeid.startswith(kind)), len(kinds))
        return _NICENESS.get(_together(item.nodeid), _BESIDE), kind

    items.sort(key=order)


def pytest_collection() -> None:
    """Disable garbage collection during the collection of tests, which makes no garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Freeze the collected tests and their imports, so that later garbage collections don't traverse them."""
    gc.freeze()
    gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Use `_Scheduling`: xdist 3.8.0 loses its own groups under pytest 9.2, which makes new node ids."""
    config.option.loadscopereorder = False
    return _Scheduling(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of absent packages, and lower the priority of workers that run beside runs of verl."""
    packages.need(*(name for mark in item.iter_markers("needs") for name in mark.args))
    if "PYTEST_XDIST_WORKER" in os.environ and os.getpriority(os.PRIO_PROCESS, 0) == 0:
        os.nice(_NICENESS.get(_together(item.nodeid), _BESIDE))


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> None:
    """Skip a long test that resembles another one, unless `--thorough` is given."""
    if not request.config.getoption("thorough"):
        pytest.skip("runs with --thorough")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in its own event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


# Arguments of each `fault` mark -> True if all its tests passed.
_held = pytest.StashKey[dict[tuple[str, str, str], bool]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Skip a test that imported an absent package, and record for each fault if its tests passed."""
    report: Any = yield
    if report.failed and call.excinfo is not None and (name := packages.lacked(call.excinfo.value)):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {packages.reason(name)}")
    mark = item.get_closest_marker("fault")
    if mark is not None and (report.when == "call" or report.failed):
        held = item.config.stash.setdefault(_held, {})
        held[mark.args] = held.get(mark.args, True) and report.passed
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table of the truth suite, and that of faults if `--faults` is given."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    if lines := truth.lines(reports):
        terminalreporter.section("truth")
        terminalreporter.write_line("\n".join(lines))
    if not config.getoption("faults"):
        return
    terminalreporter.section("faults")
    rows = [(("fault", "reaction of the run", "lost"), True), *config.stash.get(_held, {}).items()]
    for (fault, did, lost), held in rows:
        terminalreporter.write_line(f"{fault:<46}  {did:<38}  {lost if held else 'NOT CONFIRMED: the test failed'}")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AUTOPROF")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _captures_need_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip a test that captures if the environment lacks torch; tests of captures without torch still run."""
    if "torch" in packages.LACKING and request.path.name != "test_without_torch.py":
        monkeypatch.setattr(profilers.NothingTool, "start", lambda *_: pytest.skip(packages.reason("torch")))


@pytest.fixture(autouse=True)
def _a_process_that_has_just_begun() -> Iterator[None]:
    """Reset autoprof's state after each test to the state that it has on import."""
    yield
    process.reset()


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code, or a list of arguments, in a child Python whose working directory is `tmp_path`."""

    def run(code: str | list[str], *, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        arguments = ["-c", code] if isinstance(code, str) else code
        if "import torch" in str(code):
            packages.need("torch")
        result = helpers.run([sys.executable, *arguments], cwd=tmp_path, **variables)
        if check:
            assert result.returncode == 0, result.stderr
        return result

    return run


@pytest.fixture
def go(tmp_path: Path, python: helpers.Python) -> helpers.Python:
    """Run code after `from small import *`, the small trainer, with step 2 captured."""
    return small_trainer.prepare(tmp_path, python)


@pytest.fixture
def autoprof(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run autoprof's command line in `tmp_path`."""
    return functools.partial(helpers.autoprof, cwd=tmp_path)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Runtime]]:
    """Make a run with the given settings. After the test, assert that this process is not recording."""

    def make(**values: Any) -> Runtime:
        return Runtime(
            RunInfo(
                id="run",
                directory=str(tmp_path / "run"),
                command="x",
                cwd="/",
                host=identity.HOST,
                pid=0,
                started=0.0,
                python="3",
                settings=Settings(**values),
            )
        )

    yield make
    assert recorder._state.active is None


@pytest.fixture
def joined(made: Callable[..., Runtime]) -> Callable[..., Runtime]:
    """Make this process part of a run with the given settings."""

    def join(**values: Any) -> Runtime:
        runtime._state.run = made(**values)
        return runtime._state.run

    return join


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Wrap a function with a behaviour, whose options are given as in a recipe."""
    made: dict[str, behaviours.Behaviour] = {}

    def hook(function: Any, name: str, **options: Any) -> Any:
        kind = behaviours.named(name)
        assert kind is not None
        key = f"made-up/{len(made)}"
        made[key] = msgspec.convert(options, kind)
        return wrap(function, key)

    monkeypatch.setattr(registry, "active", lambda key: (runtime.current(), made[key]))
    return hook


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch) -> Callable[[behaviours.Behaviour], None]:
    """Give all hooks one behaviour, and forget earlier failures."""

    def use(behaviour: behaviours.Behaviour) -> None:
        registry._state.reset()
        monkeypatch.setattr(registry, "active", lambda key: (runtime.current(), behaviour))

    return use
