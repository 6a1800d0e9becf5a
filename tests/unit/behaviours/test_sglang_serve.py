"""SGLang's API server: its processes, and requests that begin a batch.

SGLang is made up here; `tests/engines/test_serve.py` runs the real one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture

from autoprof import _boot
from autoprof.behaviours import serving
from autoprof.behaviours import sglang as sglang_engine
from autoprof.hooks.behaviour import CALL, Call, Outcome
from autoprof.hooks.wrapper import wrap
from autoprof.run import runtime

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
    mocker.patch.object(runtime, "current", return_value=SimpleNamespace())
    hooked = wrap(Lock.release_reader, "sglang/released")
    lock = type("RWLock", (Lock,), {"release_reader": hooked})()
    return SimpleNamespace(
        model_update_lock=lock,
        server_args=SimpleNamespace(tokenizer_worker_num=1),
        server_status=SimpleNamespace(name="Up"),
    )


def set_up(manager: Any, app: Any) -> None:
    """Return a function that does what SGLang's launch does."""
    setter = eval("lambda global_state: None", {"app": app})
    around = sglang_engine.SetUp().around(Call("k", setter, (SimpleNamespace(tokenizer_manager=manager),), {}))
    finish(around)


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
    waits = finish(sglang_engine.Tokenized().around(call), error)
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
        finish(sglang_engine.Released().around(Call("k", Lock.release_reader, (manager.model_update_lock,), {})))
        assert idle.call_count == ended
