"""SGLang from the server's process: requests to the schedulers, their answers, and requests that begin a batch.

The engines are made up; real ones are driven in tests/engines."""

from __future__ import annotations

import ast
import asyncio
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from pytest_mock import MockerFixture

from autoprof import _boot
from autoprof.behaviours import serving, sglang
from autoprof.behaviours.rollout import MARK, Request
from autoprof.config.settings import Settings
from autoprof.hooks.behaviour import CALL, Call, Outcome, Reply
from autoprof.hooks.wrapper import wrap
from autoprof.run import runtime
from autoprof.run.journal import Timeline
from autoprof.rundir.layout import RunDir
from tests.support import helpers

OWN = {"contents": ["cpu"], "rollout_iterations": "0:3", "ranks": "4,5"}
REQUEST = Request(action="start", step=3, replica=2, rank=4, overrides=OWN)
IDLE = {"problem": "it was not recording"}


class ProfileReq(msgspec.Struct, kw_only=True):
    """Arguments of SGLang since 0.5.15."""

    output_dir: str | None = None
    activities: list[str] | None = None


@dataclass
class Manager:
    """A TokenizerManager up to 0.5.14, whose schedulers answer, fail or hang as the test wants."""

    answers: dict[str, str] = field(default_factory=dict)
    fails: dict[str, Exception] = field(default_factory=dict)
    hangs_s: dict[str, float] = field(default_factory=dict)
    sent: list[Request] = field(default_factory=list)
    server_args: Any = field(default_factory=SimpleNamespace)

    async def start_profile(self, output_dir: str | None = None, activities: list[str] | None = None) -> Any:
        assert output_dir is not None
        # SGLang records nothing without activities; None would mean all.
        assert activities == []
        assert output_dir.startswith(MARK)
        request = Request.read(output_dir)
        self.sent.append(request)
        await asyncio.sleep(self.hangs_s.get(request.action, 0))
        if request.action in self.fails:
            raise self.fails[request.action]
        return SimpleNamespace(success=True, message=self.answers.get(request.action, MARK))

    @property
    def actions(self) -> list[str]:
        return [request.action for request in self.sent]


class NewManager(Manager):
    """A TokenizerManager since 0.5.15."""

    async def start_profile(self, req: ProfileReq | None = None) -> Any:  # type: ignore[override]
        assert req is not None
        return await super().start_profile(req.output_dir, req.activities)


@pytest.fixture
def run(mocker: MockerFixture, tmp_path: Path) -> Any:
    made = SimpleNamespace(settings=Settings(), timeline=Timeline(RunDir(tmp_path)))
    mocker.patch.object(runtime, "current", return_value=made)
    mocker.patch.object(sglang, "_reaches_the_scheduler", return_value=True)
    mocker.patch.object(sglang, "_request_type", return_value=ProfileReq)
    return made


def drive(manager: Manager, cut: str = "") -> list[dict[str, Any]]:
    async def both() -> list[dict[str, Any]]:
        return [await sglang.start(manager, REQUEST), await sglang.stop(manager, cut)]

    return asyncio.run(both())


@pytest.mark.parametrize("kind", [Manager, NewManager])
def test_a_window_travels_to_the_schedulers_in_every_release(run: Any, kind: type[Manager]) -> None:
    manager = kind(server_args=SimpleNamespace(enable_dp_attention=True))
    assert drive(manager, "somebody came") == [{"problem": ""}, {"problem": ""}]
    start, stop = manager.sent
    assert start == REQUEST
    assert (stop.action, stop.reason) == ("stop", "somebody came")


def test_answers_of_a_scheduler_are_passed_on(run: Any) -> None:
    manager = Manager(answers={"start": MARK + "no folder"})
    assert drive(manager) == [{"problem": "no folder"}, IDLE]
    manager = Manager(answers={"stop": MARK + "the engine ran 0 forward passes"})
    assert drive(manager) == [{"problem": ""}, {"problem": "the engine ran 0 forward passes"}]
    assert not hasattr(manager, sglang.OPEN)


def test_a_scheduler_that_answers_for_itself_is_without_autoprof(run: Any) -> None:
    manager = Manager(answers={"start": "Succeeded"})
    assert drive(manager) == [{"problem": "the scheduler runs without autoprof"}, IDLE]


def test_an_engine_that_raises_is_not_recording(run: Any) -> None:
    assert drive(Manager(fails={"start": RuntimeError("no")})) == [{"problem": "RuntimeError: no"}, IDLE]
    manager = Manager(fails={"stop": RuntimeError("gone")})
    assert drive(manager)[1] == {"problem": "RuntimeError: gone"}
    assert not hasattr(manager, sglang.OPEN)


async def test_a_second_start_and_a_second_stop_are_not_sent(run: Any) -> None:
    manager = Manager()
    answers = [await sglang.stop(manager)]
    answers += [await sglang.start(manager, REQUEST), await sglang.start(manager, REQUEST)]
    answers += [await sglang.stop(manager), await sglang.stop(manager)]
    assert answers == [IDLE, {"problem": ""}, {"problem": "it is recording already"}, {"problem": ""}, IDLE]
    assert manager.actions == ["start", "stop"]


async def ended(manager: Manager) -> None:
    while hasattr(manager, sglang.OPEN):
        await asyncio.sleep(0.01)


async def test_a_stop_that_takes_too_long_is_not_waited_for(run: Any) -> None:
    run.settings = msgspec.structs.replace(run.settings, stop_timeout_s=0.05)
    manager = Manager(hangs_s={"stop": 0.3})
    assert await sglang.start(manager, REQUEST) == {"problem": ""}
    assert await sglang.stop(manager) == {"problem": "the engine did not answer within 0.05 s"}
    assert await sglang.start(manager, REQUEST) == {"problem": "it is recording already"}
    assert await sglang.stop(manager) == {"problem": "it is being stopped already"}
    await asyncio.wait_for(ended(manager), 10)
    assert manager.actions == ["start", "stop"]


async def test_a_start_that_takes_too_long_is_stopped_when_it_comes(run: Any) -> None:
    run.settings = msgspec.structs.replace(run.settings, stop_timeout_s=0.05)
    manager = Manager(hangs_s={"start": 0.2})
    assert await sglang.start(manager, REQUEST) == {"problem": "the engine did not answer within 0.05 s"}
    await asyncio.wait_for(ended(manager), 10)
    assert manager.actions == ["start", "stop"]
    assert manager.sent[1].reason == "the engine started too late"


def test_a_recording_is_a_window_on_the_timeline_and_one_that_failed_is_none(run: Any, tmp_path: Path) -> None:
    drive(Manager())
    drive(Manager(answers={"start": MARK + "no room"}))
    (window,) = helpers.spans(tmp_path)
    assert (window["kind"], window["step"], window["ids"]) == ("window", REQUEST.step, {"replica": REQUEST.replica})


def test_an_engine_without_autoprofs_hook_in_its_scheduler_is_not_driven(run: Any, mocker: MockerFixture) -> None:
    mocker.stopall()
    mocker.patch.object(runtime, "current", return_value=run)
    manager = Manager()
    assert "hook in SGLang's scheduler" in drive(manager)[0]["problem"]
    assert manager.sent == []


def ask(instance: Any, **keywords: Any) -> Any:
    """Call the hooked method of a server actor, and run its waits."""
    around = sglang.SglangActor().around(Call("verl/sglang-server", lambda: None, (instance,), keywords))
    try:
        waits = next(around)
        assert waits is not None
        around.send(asyncio.run(waits.suspend()))
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it went on")


def test_the_server_passes_the_trainers_requests_on(run: Any) -> None:
    server = SimpleNamespace(tokenizer_manager=Manager(), node_rank=0)
    asked = {"global_step": 3, "replica": 2, "rank": 4}
    assert ask(server, autoprof={"action": "start", **asked}) == Reply({"problem": ""})
    assert ask(server, autoprof={"action": "stop", **asked}) == Reply({"problem": ""})
    assert ask(server, autoprof={"action": "stop", **asked}) == Reply(IDLE)
    assert "ValidationError" in ask(server, autoprof={"action": "begin", **asked}).value["problem"]
    assert "tokenizer_manager" in ask(SimpleNamespace(), autoprof={"action": "start", **asked}).value["problem"]


@pytest.mark.parametrize(
    "server",
    [SimpleNamespace(tokenizer_manager=None, node_rank=0), SimpleNamespace(tokenizer_manager=Manager(), node_rank=1)],
)
def test_servers_without_an_engine_have_nothing_to_do(run: Any, server: Any) -> None:
    asked = {"action": "start", "global_step": 3, "replica": 2, "rank": 4}
    assert ask(server, autoprof=asked) == Reply({"problem": ""})


@pytest.mark.needs("verl")
def test_verls_server_is_what_the_hook_takes_it_for() -> None:
    verl = find_spec("verl")
    assert verl is not None
    assert verl.origin is not None
    path = Path(verl.origin).parent / "workers" / "rollout" / "sglang_rollout" / "async_sglang_server.py"
    (server,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "SGLangHttpServer"
    )
    methods = {node.name: node for node in server.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    start = methods["start_profile"]
    assert isinstance(start, ast.AsyncFunctionDef)
    assert start.args.kwarg is not None
    text = ast.unparse(server)
    assert "self.tokenizer_manager" in text
    assert "self.node_rank = node_rank" in text


ROUTES = ("/start_profile", "/stop_profile")


class Lock:
    """The part of SGLang's RWLock that autoprof uses."""

    _readers = 0

    async def release_reader(self) -> None:
        self._readers -= 1


@pytest.fixture
def app() -> Any:
    def endpoint() -> None:
        """SGLang's own route."""

    endpoint._auth_level = "admin"  # type: ignore[attr-defined]
    return SimpleNamespace(router=SimpleNamespace(routes=[SimpleNamespace(path=p, endpoint=endpoint) for p in ROUTES]))


@pytest.fixture
def manager(mocker: MockerFixture) -> Any:
    timeline = mocker.Mock()
    mocker.patch.object(runtime, "current", return_value=SimpleNamespace(timeline=timeline))
    hooked = wrap(Lock.release_reader, "sglang/released")
    lock = type("RWLock", (Lock,), {"release_reader": hooked})()
    return SimpleNamespace(
        model_update_lock=lock,
        server_args=SimpleNamespace(tokenizer_worker_num=1),
        server_status=SimpleNamespace(name="Up"),
        timeline=timeline,
    )


def set_up(manager: Any, app: Any) -> None:
    """Return a function that does what SGLang's launch does."""
    setter = eval("lambda global_state: None", {"app": app})
    around = sglang.SetUp().around(Call("k", setter, (SimpleNamespace(tokenizer_manager=manager),), {}))
    finish(around)


def test_a_server_may_wait_for_its_first_request(manager: Any, app: Any) -> None:
    set_up(manager, app)
    manager.timeline.watch_work.assert_called_once()


def finish(around: Any, error: Exception | None = None) -> list[Any]:
    """Run a behaviour to its end. Return its waits."""
    waits = []
    try:
        wait = next(around)
        while True:
            if wait is not CALL:
                waits.append(wait)
            wait = around.send(Outcome(None, error) if wait is CALL else None)
    except StopIteration:
        return waits


def requested(manager: Any, rid: Any, error: Exception | None = None) -> bool:
    """Return whether the server gets a request."""
    call = Call("k", lambda self, obj: None, (manager, SimpleNamespace(rid=rid)), {}, runtime.current())
    waits = finish(sglang.Tokenized().around(call), error)
    for wait in waits:
        wait._awaitable.close()
    return bool(waits)


def test_its_routes_come_first_and_need_the_key_that_sglangs_need(manager: Any, app: Any) -> None:
    set_up(manager, app)
    first = {route.path: route for route in app.router.routes[:2]}
    assert sorted(first) == sorted(ROUTES)
    assert {route.endpoint._auth_level for route in first.values()} == {"admin"}
    assert requested(manager, "a")


WORKER = ["python", "/ray/_private/workers/default_worker.py"]


@pytest.mark.parametrize(
    ("change", "routes"),
    [
        (lambda manager, mocker: setattr(manager.server_args, "tokenizer_worker_num", 2), 2),
        (lambda manager, mocker: delattr(manager, "model_update_lock"), 2),
        (lambda manager, mocker: mocker.patch.object(_boot, "COMMAND", _boot.Command(WORKER)), 2),
        (lambda manager, mocker: setattr(manager, "model_update_lock", Lock()), 4),
    ],
    ids=["several servers", "no lock", "a server actor of a trainer", "no hook on the lock"],
)
def test_no_batch_is_counted(manager: Any, app: Any, mocker: MockerFixture, change: Any, routes: int) -> None:
    change(manager, mocker)
    set_up(manager, app)
    assert len(app.router.routes) == routes
    assert not requested(manager, "a")


def test_sglangs_own_generations_and_refused_requests_begin_no_batch(manager: Any, app: Any) -> None:
    set_up(manager, app)
    assert not requested(manager, "HEALTH_CHECK_17.5")
    assert not requested(manager, "a", ValueError("too long"))
    assert requested(manager, ["a", "b"])
    manager.server_status.name = "Starting"
    assert not requested(manager, "a")


def test_a_batch_ends_with_the_last_that_gives_the_lock_back(manager: Any, app: Any, mocker: MockerFixture) -> None:
    set_up(manager, app)
    idle = mocker.patch.object(serving.ServedEngine, "idle")
    for readers, ended in ((1, 0), (0, 1)):
        manager.model_update_lock._readers = readers
        finish(sglang.Released().around(Call("k", Lock.release_reader, (manager.model_update_lock,), {})))
        assert idle.call_count == ended
