"""Calls of an engine's profiler, autoprof's and the user's, with the signatures of every stored release."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from autoprof.behaviours import vllm as vllm_engine
from autoprof.behaviours import vllm_worker
from autoprof.behaviours.vllm_worker import StandIn
from autoprof.hooks import registry, wrapper
from autoprof.run import end, runtime
from tests.contracts import stored
from tests.contracts.stored import contract, parameters

REQUEST = vllm_engine.Request(action="start", step=3, replica=1, rank=8)
# One value for each argument that some release takes.
ARGUMENTS = {
    "profile_prefix": "mine",
    "delay_iterations": 1,
    "max_iterations": 2,
    "profiler_kwargs": {"with_stack": False},
}


def like(release: str, module: str, name: str, behave: Callable[..., Any]) -> Any:
    """Return a function with a release's signature that calls `behave` with its arguments by name."""
    facts = contract("vllm", release).find(module, name)
    taken = ", ".join(f"{name}={name}" for name in parameters(facts) if name != "*")
    lines = [
        "from __future__ import annotations",
        f"{'async ' * facts['async']}def made({', '.join(facts['parameters'])}):",
        f"    return {'await ' * facts['async']}behave({taken})",
    ]
    space: dict[str, Any] = {"behave": behave}
    exec("\n".join(lines), space)
    return space["made"]


class Processor:
    def add_request(self) -> None: ...
    def process_outputs(self) -> None: ...


class Worker:
    """A worker with the signatures of the release's profiler methods."""

    rank = 0
    profiler_config: Any = SimpleNamespace(profiler="torch")
    profiler: Any = None

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []


class Engine:
    """An `AsyncLLM` of the release, in whose process the worker lives."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.output_processor = Processor()
        self.worker: Any = None

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(self.worker, method)(*args)]


@pytest.fixture
def engine(request: pytest.FixtureRequest, joined: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    release = request.param

    def profiled(self: Any, is_start: bool = True, **arguments: Any) -> None:
        self.calls.append(arguments)
        if isinstance(self.profiler, StandIn):
            if is_start and "profile_prefix" in arguments:
                self.profiler.set_output_name("dp0_rank0")
            if is_start and "profiler_kwargs" in arguments:
                self.profiler.set_profiler_kwargs(arguments["profiler_kwargs"])
            bounds = {name: value for name, value in arguments.items() if name.endswith("_iterations")}
            self.profiler.start(**bounds) if is_start else self.profiler.stop()

    async def call(action: str, self: Any, **arguments: Any) -> None:
        self.calls.append((action, arguments))
        self.worker.profile(action == "start", **arguments)

    worker_like = like(release, "vllm.v1.worker.gpu_worker", "Worker.profile", profiled)
    kind = type("ReleasedWorker", (Worker,), {"profile": worker_like})
    methods = {}
    for action in ("start", "stop"):
        made = like(
            release, "vllm.v1.engine.async_llm", f"AsyncLLM.{action}_profile", functools.partial(_call, call, action)
        )
        methods[f"{action}_profile"] = wrapper.wrap(made, f"vllm/{action}-profile")
    behaviours = {f"vllm/{action}-profile": vllm_engine.Engine(action=action) for action in ("start", "stop")}  # type: ignore[arg-type]
    monkeypatch.setattr(registry, "active", lambda key: (runtime.current(), behaviours[key]))
    joined(contents=("cpu",), ranks="all")
    monkeypatch.setattr(vllm_worker, "_rank_part", lambda worker: f"rank{worker.rank}")
    vllm_worker.Worker().install(kind)
    made = type("ReleasedEngine", (Engine,), methods)()
    made.worker = kind()
    return made


async def _call(call: Any, action: str, /, **arguments: Any) -> None:
    await call(action, arguments.pop("self"), **arguments)


def taken(engine: Any) -> dict[str, Any]:
    """Return the arguments of this release's start."""
    return {name: ARGUMENTS[name] for name in inspect.signature(engine.start_profile).parameters}


every_release = pytest.mark.parametrize("engine", stored.versions("vllm"), indirect=True)


@every_release
async def test_the_users_arguments_pass_unchanged(engine: Any) -> None:
    await engine.start_profile(**taken(engine))
    assert await vllm_engine.start(engine, REQUEST) == {"problem": "another caller is profiling the engine"}
    await engine.stop_profile()
    for name in ARGUMENTS.keys() - taken(engine):
        with pytest.raises(TypeError, match=name):
            await engine.start_profile(**{name: ARGUMENTS[name]})
    assert engine.calls == [("start", taken(engine)), ("stop", {})]
    assert engine.worker.calls[0] == taken(engine)


@every_release
@pytest.mark.needs("torch")
async def test_autoprofs_own_calls_give_no_argument(engine: Any) -> None:
    assert await vllm_engine.start(engine, REQUEST) == {"problem": ""}
    assert await vllm_engine.stop(engine) == {"problem": ""}
    await engine.start_profile(**taken(engine))
    assert engine.calls == [("start", dict.fromkeys(taken(engine))), ("stop", {}), ("start", taken(engine))]
    assert engine.worker.profiler is None
    run = runtime.current()
    assert run is not None
    end.wait_for_files(run)
    assert len(list(run.rundir.step(3).glob("rollout.replica1.rank0.*.gz"))) == 1


@every_release
async def test_the_users_start_during_a_capture_has_its_arguments(engine: Any) -> None:
    await vllm_engine.start(engine, REQUEST)
    await engine.start_profile(**taken(engine))
    assert await vllm_engine.stop(engine) == {"problem": "it was not recording"}
    assert engine.calls[-2:] == [("stop", {}), ("start", taken(engine))]
