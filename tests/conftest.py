"""What all tests share: an environment without autoprof's variables, and Python in child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers import clean_environment
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from autoprof import _files, behaviours, capture, gates, importing, log, naming, rundir, runtime
from autoprof.runtime import RunInfo, Runtime
from autoprof.settings import Settings
from autoprof.wrapping import wrap

# Machines that run the tests may be slow and busy; nothing here asserts on time.
settings.register_profile(
    "autoprof", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("autoprof")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much is run."""
    parser.addoption("--faults", action="store_true", help="print the table of what was let go wrong")
    parser.addoption("--thorough", action="store_true", help="make the real runs too for which CI has no time")


class _Scheduling(LoadScopeScheduling):
    """The real runs go to one process of `-n 2`: tests share them, and Ray joins whichever cluster it finds. Those of
    vLLM without Ray go to one, too, which may be the other, beside the units. Programs of the differential suite go
    wherever there is room."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        if module.startswith("tests/differential/"):
            return nodeid
        if not module.startswith("tests/real/"):
            return module
        return "vllm" if module.startswith("tests/real/test_vllm") and "ray" not in module else "real"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """How tests are shared out. xdist's own groups get lost in pytest 9.2, which makes node ids anew (xdist 3.8.0)."""
    return _Scheduling(config, log)


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> None:
    """What takes long and is much like something else: not without `--thorough`."""
    if not request.config.getoption("thorough"):
        pytest.skip("runs with --thorough")


# Of each test of a fault, by what it says of itself, whether it held.
_held = pytest.StashKey[dict[tuple[str, str, str], bool]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note which faults did what their tests say."""
    report: Any = yield
    mark = item.get_closest_marker("fault")
    if mark is not None and (report.when == "call" or report.failed):
        held = item.config.stash.setdefault(_held, {})
        held[mark.args] = held.get(mark.args, True) and report.passed
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table of faults."""
    if not config.getoption("faults"):
        return
    terminalreporter.section("faults")
    rows = [(("what went wrong", "what the run did", "what was lost"), True), *config.stash.get(_held, {}).items()]
    for (fault, did, lost), held in rows:
        terminalreporter.write_line(f"{fault:<46}  {did:<38}  {lost if held else 'NOT SO: the test failed'}")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AUTOPROF")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _a_log_that_has_said_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is warned of once in a process is warned of in each test."""
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(log._logger, "propagate", True)


@pytest.fixture(autouse=True)
def _files_of_the_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier test let the group read is no affair of this one."""
    monkeypatch.setattr(_files, "_group", False)


@pytest.fixture(autouse=True)
def _hooks_that_never_failed() -> Iterator[None]:
    yield
    for known in (gates._failures, gates._groups, gates._counting):
        known.clear()
    for gate in gates._gates.values():
        gate.clear()


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code, or a list of arguments, in a child Python whose working directory is `tmp_path`."""

    def run(code: str | list[str], *, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        arguments = ["-c", code] if isinstance(code, str) else code
        result = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=clean_environment(**variables),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if check:
            assert result.returncode == 0, result.stderr
        return result

    return run


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Runtime]]:
    """Makes a run with these settings. No recording may be left in this process."""

    def make(**values: Any) -> Runtime:
        return Runtime(
            RunInfo(
                id="run",
                directory=str(tmp_path / "run"),
                command="x",
                cwd="/",
                host=rundir.HOST,
                pid=0,
                started=0.0,
                python="3",
                settings=Settings(**values),
            )
        )

    naming._repeats.clear()
    yield make
    assert capture._active is None


@pytest.fixture
def joined(made: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runtime]:
    """Makes this process part of a run with these settings."""

    def join(**values: Any) -> Runtime:
        run = made(**values)
        monkeypatch.setattr(runtime, "_runtime", run)
        monkeypatch.setattr(runtime, "_off", False)
        return run

    return join


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Wraps a function with a behaviour, made from the options as a recipe gives them."""
    made: dict[str, behaviours.Behaviour] = {}

    def hook(function: Any, name: str, **options: Any) -> Any:
        kind = behaviours.find(name)
        assert kind is not None
        key = f"made-up/{len(made)}"
        made[key] = msgspec.convert(options, kind)
        return wrap(function, key)

    monkeypatch.setattr(importing, "behaviour", made.get)
    return hook


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch) -> Callable[[behaviours.Behaviour], None]:
    """Has all hooks behave as it is told, whatever failed before."""

    def use(behaviour: behaviours.Behaviour) -> None:
        gates._failures.clear()
        for gate in gates._gates.values():
            gate.clear()
        monkeypatch.setattr(importing, "behaviour", lambda key: behaviour)

    return use
