"""vLLM's engine: calls of its profiler with the signatures of every stored release, and captures of its front end."""

from __future__ import annotations

import functools
import gzip
import inspect
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoprof.behaviours import rollout, vllm_worker
from autoprof.behaviours import vllm as vllm_engine
from autoprof.behaviours.vllm_worker import StandIn
from autoprof.capture import recorder
from autoprof.capture.artifacts import Subject
from autoprof.hooks import registry, wrapper
from autoprof.run import end, runtime
from autoprof.run.runtime import Runtime
from autoprof.rundir import file_names
from tests.contracts import stored
from tests.contracts.stored import contract, parameters
from tests.support.captures import begun

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


SUBJECT = Subject(step=3, role="rollout", stage="rollout", rank=8, replica=1, part="frontend")


class OutputProcessor:
    """The signatures of 0.9 to 0.33, output_processor.py."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def add_request(self, request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0) -> None:
        self.seen.append(("add", request))

    def process_outputs(
        self, engine_core_outputs: list[Any], engine_core_timestamp: float | None = None, iteration_stats: Any = None
    ) -> int:
        if engine_core_outputs == ["bad"]:
            raise KeyError("theirs")
        self.seen.append(("out", engine_core_timestamp))
        return len(engine_core_outputs)


class FrontEndEngine:
    def __init__(self, data_parallel: int = 1) -> None:
        self.output_processor = OutputProcessor()
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=data_parallel))

    def put_out(self, passes: int, pieces: int = 1) -> None:
        """As AsyncLLM's output handler does, with an output that holds no token among them."""
        self.output_processor.add_request("r", None)
        for number in range(passes):
            for _ in range(pieces):
                assert self.output_processor.process_outputs(["a", "b"], float(number), None) == 2
        assert self.output_processor.process_outputs([], 0.5, None) == 0


def found(run: Runtime) -> tuple[dict[str, Any], Counter[str]]:
    """Return the meta file of the only capture, and the count of each event in its trace."""
    end.wait_for_files(run)
    (path,) = run.rundir.path.rglob("rollout.replica1.frontend.*.meta.json")
    trace = Path(str(path).replace(file_names.META, file_names.TRACE))
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return json.loads(path.read_text()), Counter(event.get("name") for event in events)


def record(run: Runtime, engine: FrontEndEngine, outputs: int, cut: str = "") -> None:
    """Record the front end of an engine while it produces outputs."""
    vllm_engine.begin_front_end(engine, run, SUBJECT, run.settings)
    if outputs:
        engine.put_out(outputs)
    vllm_engine.end_front_end(engine, cut)


@pytest.mark.parametrize(
    ("iterations", "data_parallel", "pieces", "recorded"),
    [("0:100", 1, 1, 10), ("0:4", 1, 1, 4), ("2:5", 1, 1, 3), ("0:4", 1, 3, 12), ("1:3", 2, 1, 4), ("all", 1, 1, 10)],
)
def test_as_many_outputs_are_recorded_as_passes_are_asked_for(
    made: Any, iterations: str, data_parallel: int, pieces: int, recorded: int
) -> None:
    run, engine = made(rollout_iterations=iterations), FrontEndEngine(data_parallel)
    vllm_engine.begin_front_end(engine, run, SUBJECT, run.settings)
    engine.put_out(9 if iterations in ("0:100", "all") else 10, pieces)
    vllm_engine.end_front_end(engine, "")
    meta, names = found(run)
    assert (meta["state"], meta["reason"], meta["contents"]) == ("complete", "", ["cpu"])
    assert names["process_outputs"] == recorded
    assert names["add_request"] == (1 if iterations[0] in "0a" else 0)
    assert list(vars(engine.output_processor)) == ["seen"]
    assert list(vars(engine)) == ["output_processor", "vllm_config"]


def test_what_the_front_end_can_not_record_is_named_as_left_out(made: Any) -> None:
    run, engine = made(contents=("cuda", "stack", "merge-profiles")), FrontEndEngine()
    record(run, engine, 2, "somebody else needs it")
    meta, names = found(run)
    assert (meta["contents"], meta["left_out"]) == (["cpu", "stack"], ["cuda"])
    assert (meta["state"], meta["reason"]) == ("truncated", "somebody else needs it")
    assert sum("process_outputs" in str(name) for name in names) > 1  # the annotation, and Python's own call


@pytest.mark.parametrize(("contents", "recorded"), [((), 9), (("stack",), 0)])
def test_it_ends_before_the_event_loop_would_stand_still_for_long(
    made: Any, monkeypatch: pytest.MonkeyPatch, contents: tuple[str, ...], recorded: int
) -> None:
    monkeypatch.setattr(vllm_engine, "MAX_FRONT_END_BYTES", 2_900)
    run, engine = made(rollout_iterations="all", contents=contents), FrontEndEngine()
    record(run, engine, 50)
    meta, names = found(run)
    assert (meta["state"], meta["reason"]) == ("truncated", "a recording of the front end is limited to 0.0029 MB")
    assert names["process_outputs"] == recorded


def test_an_idle_engine_leaves_a_complete_and_empty_trace(made: Any) -> None:
    run, engine = made(), FrontEndEngine()
    vllm_engine.begin_front_end(engine, run, SUBJECT, run.settings)
    vllm_engine.end_front_end(engine, "")
    vllm_engine.end_front_end(engine, "")
    meta, names = found(run)
    assert (meta["state"], meta["reason"]) == ("complete", "the engine produced no output")
    assert names["process_outputs"] == 0


def test_passes_that_never_came_leave_nothing(made: Any) -> None:
    run, engine = made(rollout_iterations="20:30"), FrontEndEngine()
    record(run, engine, 5)
    assert not run.rundir.path.exists()


def test_it_gives_way_to_what_records_already(made: Any) -> None:
    run, engine = made(), FrontEndEngine()
    stage = begun(run, Subject(step=3, role="trainer", stage="x", rank=0))
    record(run, engine, 3)
    stage.stop()
    end.wait_for_files(run)
    assert [path.name.split(".rank0")[0] for path in run.rundir.path.rglob("*.meta.json")] == ["trainer.x"]


def test_it_gives_way_to_another_profiler_in_its_thread(made: Any) -> None:
    recorder.watch_others()
    run, engine = made(), FrontEndEngine()
    vllm_engine.begin_front_end(engine, run, SUBJECT, run.settings)
    engine.put_out(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        engine.put_out(3)
    vllm_engine.end_front_end(engine, "")
    meta, names = found(run)
    assert (meta["state"], names["process_outputs"]) == ("truncated", 4)
    assert not any(event.name == "process_outputs" for event in theirs.events())


def test_errors_pass_and_ours_cost_the_recording_only(made: Any, mocker: Any) -> None:
    report = mocker.patch("autoprof.run.runtime.report")
    mocker.patch.object(vllm_engine.TorchTool, "start", side_effect=RuntimeError("ours"))
    engine = FrontEndEngine()
    run = made()
    vllm_engine.begin_front_end(engine, run, SUBJECT, run.settings)
    with pytest.raises(KeyError, match="theirs"):
        engine.output_processor.process_outputs(["bad"])
    engine.put_out(3)
    vllm_engine.end_front_end(engine, "")
    assert [call.args[0] for call in report.mock_calls] == ["vllm/front-end"]
    assert len(engine.output_processor.seen) == 5
    vllm_engine.begin_front_end(SimpleNamespace(), run, SUBJECT, run.settings)  # an engine of an unknown release


def test_it_can_be_left_out(made: Any) -> None:
    run, engine = made(disable=("vllm/front-end",)), FrontEndEngine()
    record(run, engine, 3)
    assert not run.rundir.path.exists()


def test_a_patch_of_another_library_is_kept(made: Any) -> None:
    run, engine = made(), FrontEndEngine()
    engine.output_processor.process_outputs = lambda *_: 5  # type: ignore[method-assign]
    vllm_engine.begin_front_end(engine, run, SUBJECT, run.settings)
    vllm_engine.end_front_end(engine, "")
    assert engine.output_processor.process_outputs([]) == 5
    end.wait_for_files(run)


@pytest.mark.parametrize("stops", ["shutdown", "close"])
@pytest.mark.parametrize(
    ("status", "open_requests", "message"),
    [(-9, "abcd", "4 requests failed"), (-9, "", "no request was open"), (None, "abcd", ""), (0, "abcd", "")],
)
def test_only_a_core_that_vllm_did_not_stop_is_recorded_as_dead(
    made: Any, mocker: Any, stops: str, status: int | None, open_requests: str, message: str
) -> None:
    run = made()
    mocker.patch.object(rollout.runtime, "current", return_value=run)
    cores = [
        SimpleNamespace(name=f"EngineCore_DP{rank}", pid=rank + 70, exitcode=status if rank else None, join=lambda _: 0)
        for rank in range(2)
    ]

    def kill(manager: Any) -> None:
        for core in manager.processes:
            core.exitcode = -9

    manager = type("Manager", (), {stops: kill, "processes": cores})()
    engine = SimpleNamespace(
        output_processor=OutputProcessor(),
        engine_core=SimpleNamespace(resources=SimpleNamespace(engine_manager=manager)),
    )
    engine.output_processor.request_states = dict.fromkeys(open_requests)
    for _ in range(2):
        vllm_engine._watch_cores(engine)
        getattr(manager, stops)()
    assert cores[0].exitcode == -9
    journals = [path.read_text() for path in run.rundir.lines("journal")]
    lines = [json.loads(line) for text in journals for line in text.splitlines()]
    found = [line["exception"] for line in lines if line["kind"] == "raised"]
    named = [{"pid": 71, "name": "vLLM's EngineCore_DP1", "signal": "SIGKILL"}]
    assert found == ([{"type": "vLLM", "message": message, "named": named}] if message else [])
