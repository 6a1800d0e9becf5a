"""`vllm serve` under autoprof, without a trainer: windows by number of the generation batch, and by request."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support import servers
from tests.support.helpers import clean_environment
from tests.support.servers import serve

PROMPT = {"model": "tiny", "prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True}
# Takes several seconds: 16 answers, four at a time.
LONG = PROMPT | {"max_tokens": 480, "n": 16, "stream": True, "temperature": 1}


def generate(server: servers.Server, tokens: int = 6) -> str:
    status, answer = server.post("/v1/completions", PROMPT | {"max_tokens": tokens})
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    yield from serve(tmp_path_factory.mktemp("serve"), AUTOPROF="1", AUTOPROF_STEPS="2,4")


@pytest.fixture(scope="module")
def batches(server: servers.Server) -> list[str]:
    """Send five generation batches: the fourth has three concurrent requests, the others one request."""
    texts = [generate(server) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        texts += pool.map(lambda _: generate(server, 12), range(3))
    return [*texts, generate(server)]


def test_the_chosen_batches_are_captured(server: servers.Server, batches: list[str]) -> None:
    assert server.passes(2) in (6, 7)
    # Three answers of twelve tokens, generated together, or one after the other on a slow machine. The fifth batch is
    # not in the trace.
    assert server.passes(4) in range(12, 37)
    assert [step for step in server.steps() if step < 1000] == [2, 4]
    assert len({text for text in batches if len(text) == len(batches[0])}) == 1


def test_every_batch_is_a_step_of_the_timeline(server: servers.Server, batches: list[str]) -> None:
    assert [span["step"] for span in server.spans()][:4] == [1, 2, 3, 4]


def test_a_request_opens_a_window_and_can_name_the_step(server: servers.Server, batches: list[str]) -> None:
    assert server.post("/start_profile", {"global_step": 1107}) == (200, {"problem": ""})
    before = generate(server)
    assert generate(server) == before
    assert server.post("/stop_profile") == (200, {"problem": ""})
    assert server.passes(1107) in range(12, 16)


def test_requests_out_of_order_are_refused_and_the_server_still_works(
    server: servers.Server, batches: list[str]
) -> None:
    assert server.post("/stop_profile") == (409, {"problem": "no window is open"})
    assert server.post("/start_profile", {"global_step": 1108})[0] == 200
    assert server.post("/start_profile", {"global_step": 1109}) == (409, {"problem": "a window is open already"})
    text = generate(server)
    assert server.post("/stop_profile")[0] == 200
    assert server.post("/stop_profile")[0] == 409
    status, answer = server.post("/start_profile", {"global_step": "x"})
    assert (status, answer["problem"]) == (400, "global_step: got 'x'; it takes a whole number from 0")
    assert generate(server) == text
    assert server.steps()[-1] == 1108


def test_a_request_without_a_body_opens_a_window(server: servers.Server, batches: list[str]) -> None:
    known = set(server.steps())
    assert server.post("/start_profile")[0] == 200
    generate(server)
    assert server.post("/stop_profile")[0] == 200
    (new,) = set(server.steps()) - known
    assert 5 < new < 1000


def test_a_window_opens_in_the_middle_of_a_batch(server: servers.Server, batches: list[str]) -> None:
    known = set(server.steps())
    began = time.time_ns()
    with server.streaming("/v1/completions", LONG) as answer:
        assert server.post("/start_profile") == (200, {"problem": ""})
        answer.read()
    assert server.post("/stop_profile") == (200, {"problem": ""})
    # The window has the number of the batch in which it was opened.
    (new,) = set(server.steps()) - known
    assert server.passes(new) in range(1, 101)
    assert server.batch_since(began) == new


def trigger(server: servers.Server, *options: str) -> None:
    command = [sys.executable, "-m", "autoprof", "trigger", *options]
    subprocess.run(command, cwd=server.folder, env=clean_environment(), check=True, capture_output=True, timeout=60)


def test_a_trigger_opens_the_next_batch(server: servers.Server, batches: list[str]) -> None:
    known = set(server.steps())
    trigger(server, "--rollout-iterations", "1:3", "--contents", "cpu,shapes")
    assert generate(server) == generate(server)
    (new,) = set(server.steps()) - known
    assert server.passes(new) == 2
    assert server.meta(new)["contents"] == ["cpu", "shapes"]


def test_a_waiting_trigger_prints_the_paths_of_the_next_batches(server: servers.Server, batches: list[str]) -> None:
    known = set(server.steps())
    command = [sys.executable, "-m", "autoprof", "trigger", "--steps", "2", "--wait"]
    with subprocess.Popen(
        command, cwd=server.folder, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as waiting:
        deadline = time.monotonic() + 120
        while waiting.poll() is None and time.monotonic() < deadline:
            generate(server)
        lines = waiting.communicate(timeout=60)[0].splitlines()
    assert waiting.returncode == 0, lines
    new = sorted(set(server.steps()) - known)
    assert len(new) == 2
    assert lines[-2:] == [str(server.run().resolve() / f"global_step_{step:06d}") for step in new]
    assert {meta["window"] for meta in map(server.meta, new)} == {"autoprof trigger"}


def test_a_trigger_reaches_a_server_that_is_never_idle(server: servers.Server, batches: list[str]) -> None:
    known = set(server.steps())
    deadline = time.monotonic() + 60
    with server.streaming("/v1/completions", LONG) as answer:
        trigger(server, "--rollout-iterations", "0:2")
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(answer.read)
            # autoprof looks for triggers at most once a second, when a request arrives.
            while set(server.steps()) == known and time.monotonic() < deadline:
                generate(server, 2)
            reading.result()
    (new,) = set(server.steps()) - known
    assert server.passes(new) == 2


def test_a_batch_ends_when_its_last_client_goes_away(server: servers.Server, batches: list[str]) -> None:
    began = time.time_ns()
    with server.streaming("/v1/completions", LONG):
        pass
    server.batch_since(began)
    assert generate(server) == batches[0]


def test_a_window_closes_after_its_time(server: servers.Server, batches: list[str]) -> None:
    assert server.post("/start_profile", {"global_step": 1111, "duration_s": 3}) == (200, {"problem": ""})
    assert generate(server) == batches[0]
    assert server.passes(1111) in (6, 7)
    assert server.post("/stop_profile") == (409, {"problem": "no window is open"})
    assert server.post("/start_profile", {"global_step": 1112, "duration_s": 600})[0] == 200
    assert generate(server) == batches[0]
    assert server.post("/stop_profile") == (200, {"problem": ""})
    assert server.passes(1112) in (6, 7)


@pytest.mark.parametrize("wrong", ["5", 0, -1, True, [3], 1e999])
def test_a_wrong_time_is_refused(server: servers.Server, wrong: object) -> None:
    status, answer = server.post("/start_profile", {"duration_s": wrong})
    assert status == 400
    assert answer["problem"].startswith("duration_s: got ")
    assert answer["problem"].endswith("; it takes seconds, above 0 and below 1e9")


def test_a_body_other_than_a_json_object_is_refused(server: servers.Server) -> None:
    for body in (b"{", b"[1]"):
        status, answer = server.post("/start_profile", body)
        problem = f"body: got {body.decode()!r}; it takes an object in JSON, or nothing"
        assert (status, answer["problem"]) == (400, problem)


def test_autoprof_has_no_errors_and_no_hook_failed(server: servers.Server, batches: list[str]) -> None:
    generate(server)
    assert server.errors() == []
