"""Servers of the installed vLLM and of each release of SGLang under autoprof, without a trainer.

Windows open by number of the generation batch and by request, and close after a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from tests.support import engines, judged_runs, servers
from tests.support.helpers import clean_environment, processes_of

RELEASES = ["vllm", *(name for name in engines.NAMES if name.startswith("sglang-"))]
# Command of each release of SGLang. Newer releases recommend `sglang serve`.
FORMS = {"sglang-0.5.8": ["python", "-m", "sglang.launch_server"], "sglang-0.5.23": ["sglang", "serve"]}
OPTIONS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none --dtype float32 "
    "--max-total-tokens 1024 --max-running-requests 4 --mem-fraction-static 0.1 --host 127.0.0.1"
)
ON = {"AUTOPROF": "1", "AUTOPROF_STEPS": "2,4"}


class Serving:
    """Requests to a server in the form of its engine."""

    def __init__(self, server: servers.Server, name: str) -> None:
        self.server, self.sglang = server, name.startswith("sglang-")
        self.path = "/generate" if self.sglang else "/v1/completions"

    def body(self, tokens: int, samples: int = 1, **more: Any) -> dict[str, Any]:
        values = {"temperature": 0, "ignore_eos": True, "n": samples} | more
        stream = {"stream": True} if values.pop("stream", False) else {}
        if self.sglang:
            return {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": tokens, **values}} | stream
        return {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": tokens, **values} | stream

    def generate(self, tokens: int = 6, samples: int = 1) -> Any:
        """Generate, and return the text or the token ids, as a list for each sample if there are several."""
        status, answer = self.server.post(self.path, self.body(tokens, samples))
        assert status == 200, answer
        if not self.sglang:
            return answer["choices"][0]["text"]
        return answer["output_ids"] if samples == 1 else [one["output_ids"] for one in answer]

    def streaming(self) -> Any:
        """Request 16 answers, four at a time, which take several seconds."""
        return self.server.streaming(self.path, self.body(480, 16, temperature=1, stream=True))

    def read_to_the_end(self) -> None:
        """Read the answers, until the engine has sent them or has died."""
        with contextlib.suppress(OSError, HTTPException, AssertionError), self.streaming() as answer:
            answer.read()

    def window(self, number: int) -> Any:
        """Generate within a window with the number of this step, check it, and return the answer."""
        assert self.server.post("/start_profile", {"global_step": number}) == (200, {"problem": ""})
        answer = self.generate()
        assert self.server.post("/stop_profile") == (200, {"problem": ""})
        assert self.server.passes(number) in (6, 7)
        return answer


@pytest.fixture(scope="module", params=RELEASES)
def serving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    name, folder = request.param, tmp_path_factory.mktemp("serve")
    if name == "vllm":
        started = servers.serve(folder, **ON)
    else:
        engine, port = engines.Engine(name, folder), servers.free_port()
        program, *form = FORMS[name]
        place = ["--model-path", engine.model, "--port", str(port)]
        command = [str(Path(engine.python).with_name(program)), *form, *place, *OPTIONS.split()]
        server = servers.Server(folder, port, "aten::embedding")
        started = servers.running(server, command, engine.environment | ON)
    for server in started:
        yield Serving(server, name)


@pytest.fixture
def server(serving: Serving) -> servers.Server:
    return serving.server


@pytest.fixture(scope="module")
def batches(serving: Serving) -> list[Any]:
    """Send five generation batches: the fourth has three concurrent requests, the others one request."""
    answers = [serving.generate() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        answers += pool.map(lambda _: serving.generate(12), range(3))
    return [*answers, serving.generate()]


@pytest.fixture
def vllm(serving: Serving, batches: list[Any]) -> servers.Server:
    """Server of vLLM, for tests of commands, which need no other engine."""
    if serving.sglang:
        pytest.skip("is tested with vLLM")
    return serving.server


@pytest.fixture
def sglang(serving: Serving, batches: list[Any]) -> servers.Server:
    if not serving.sglang:
        pytest.skip("vLLM has no such requests")
    return serving.server


def test_the_chosen_batches_are_captured(serving: Serving, server: servers.Server, batches: list[Any]) -> None:
    assert server.passes(2) in (6, 7)
    # Three answers of twelve tokens, generated together, or one after the other on a slow machine. The fifth batch is
    # not in the trace.
    assert server.passes(4) in range(12, 40)
    assert [step for step in server.steps() if step < 1000] == [2, 4]
    # The text of the first tokens of an answer may end within a character.
    same = [answer[: len(batches[0])] for answer in batches if serving.sglang or len(answer) == len(batches[0])]
    assert all(answer == batches[0] for answer in same)


def test_every_batch_is_a_step_of_the_timeline(server: servers.Server, batches: list[Any]) -> None:
    # The engine's own warm-up request is not a step.
    assert [span["step"] for span in server.spans()][:4] == [1, 2, 3, 4]


def test_samples_of_one_prompt_are_one_batch(serving: Serving, sglang: servers.Server, batches: list[Any]) -> None:
    known = len(sglang.spans())
    assert serving.generate(samples=3) == [batches[0]] * 3
    serving.generate()
    assert [span["step"] for span in sglang.spans()][known:][:1] == [known + 1]
    assert len(sglang.spans()) in (known + 1, known + 2)


def test_a_request_opens_a_window_and_can_name_the_step(
    serving: Serving, server: servers.Server, batches: list[Any]
) -> None:
    assert server.post("/start_profile", {"global_step": 1107}) == (200, {"problem": ""})
    assert serving.generate() == serving.generate() == batches[0]
    assert server.post("/stop_profile") == (200, {"problem": ""})
    assert server.passes(1107) in range(12, 16)


def test_a_window_opens_in_the_middle_of_a_batch(serving: Serving, server: servers.Server, batches: list[Any]) -> None:
    known = set(server.steps())
    began = time.time_ns()
    with serving.streaming() as answer:
        assert server.post("/start_profile") == (200, {"problem": ""})
        answer.read()
    assert server.post("/stop_profile") == (200, {"problem": ""})
    # The window has the number of the batch in which it was opened.
    (new,) = set(server.steps()) - known
    assert server.passes(new) in range(1, 101)
    assert server.batch_since(began) == new


def test_a_window_closes_after_its_time(serving: Serving, server: servers.Server, batches: list[Any]) -> None:
    assert server.post("/start_profile", {"global_step": 1111, "duration_s": 3}) == (200, {"problem": ""})
    assert serving.generate() == batches[0]
    assert server.passes(1111) in (6, 7)
    assert server.post("/stop_profile") == (409, {"problem": "no window is open"})
    # A window that was stopped early is not closed again when its time is over.
    assert server.post("/start_profile", {"global_step": 1112, "duration_s": 0.5})[0] == 200
    assert server.post("/stop_profile")[0] in (200, 409)
    assert server.post("/start_profile", {"global_step": 1113, "duration_s": 600})[0] == 200
    assert serving.generate() == batches[0]
    assert server.post("/stop_profile") == (200, {"problem": ""})
    assert server.passes(1113) in (6, 7)


def test_requests_out_of_order_are_refused_and_the_server_still_works(
    serving: Serving, server: servers.Server, batches: list[Any]
) -> None:
    assert server.post("/stop_profile") == (409, {"problem": "no window is open"})
    assert server.post("/start_profile", {"global_step": 1108})[0] == 200
    assert server.post("/start_profile", {"global_step": 1109}) == (409, {"problem": "a window is open already"})
    assert serving.generate() == batches[0]
    assert server.post("/stop_profile")[0] == 200
    assert server.post("/stop_profile")[0] == 409
    for body, problem in (
        ({"global_step": "x"}, "global_step: got 'x'; it takes a whole number from 0"),
        ({"duration_s": -1}, "duration_s: got -1; it takes seconds, above 0 and below 1e9"),
    ):
        status, answer = server.post("/start_profile", body)
        assert (status, answer["problem"]) == (400, problem)
    assert serving.generate() == batches[0]
    assert 1109 not in server.steps()


@pytest.mark.parametrize("wrong", ["5", 0, True, [3], 1e999])
def test_a_wrong_time_is_refused(vllm: servers.Server, wrong: object) -> None:
    status, answer = vllm.post("/start_profile", {"duration_s": wrong})
    assert status == 400
    assert answer["problem"].startswith("duration_s: got ")
    assert answer["problem"].endswith("; it takes seconds, above 0 and below 1e9")


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_request_without_a_body_opens_a_window(
    serving: Serving, server: servers.Server, batches: list[Any], method: str
) -> None:
    if method == "GET" and not serving.sglang:
        pytest.skip("vLLM has no such requests")
    known = set(server.steps())
    assert server.post("/start_profile", method=method) == (200, {"problem": ""})
    serving.generate()
    assert server.post("/stop_profile", method=method) == (200, {"problem": ""})
    (new,) = set(server.steps()) - known
    assert 5 < new < 1000


def test_a_body_other_than_a_json_object_is_refused_or_answered_by_the_engine(
    serving: Serving, server: servers.Server, batches: list[Any]
) -> None:
    if serving.sglang:
        assert server.post("/start_profile", b"{")[0] in (400, 422)
        assert server.post("/stop_profile")[0] >= 400
    else:
        for body in (b"{", b"[1]"):
            problem = f"body: got {body.decode()!r}; it takes an object in JSON, or nothing"
            assert server.post("/start_profile", body) == (400, {"problem": problem})
    assert server.post("/stop_profile") == (409, {"problem": "no window is open"})


def trigger(server: servers.Server, *options: str) -> subprocess.Popen[str]:
    """Start `autoprof trigger` in the server's folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "autoprof", "trigger", *options],
        cwd=server.folder,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def triggered(server: servers.Server, *options: str) -> None:
    with trigger(server, *options) as command:
        output = command.communicate(timeout=60)[0]
    assert command.returncode == 0, output


def test_a_trigger_opens_the_next_batch(serving: Serving, vllm: servers.Server) -> None:
    known = set(vllm.steps())
    triggered(vllm, "--rollout-iterations", "1:3", "--contents", "cpu,shapes")
    assert serving.generate() == serving.generate()
    (new,) = set(vllm.steps()) - known
    assert vllm.passes(new) == 2
    assert vllm.meta(new)["contents"] == ["cpu", "shapes"]


def test_a_waiting_trigger_prints_the_paths_of_the_next_batches(serving: Serving, vllm: servers.Server) -> None:
    known = set(vllm.steps())
    with trigger(vllm, "--steps", "2", "--wait") as waiting:
        deadline = time.monotonic() + 120
        while waiting.poll() is None and time.monotonic() < deadline:
            serving.generate()
        lines = waiting.communicate(timeout=60)[0].splitlines()
    assert waiting.returncode == 0, lines
    new = sorted(set(vllm.steps()) - known)
    assert len(new) == 2
    assert lines[-2:] == [str(vllm.run().resolve() / f"global_step_{step:06d}") for step in new]
    assert {meta["window"] for meta in map(vllm.meta, new)} == {"autoprof trigger"}


def test_a_trigger_reaches_a_server_that_is_never_idle(serving: Serving, vllm: servers.Server) -> None:
    known = set(vllm.steps())
    deadline = time.monotonic() + 60
    with serving.streaming() as answer:
        triggered(vllm, "--rollout-iterations", "0:2")
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(answer.read)
            # autoprof looks for triggers at most once a second, when a request arrives.
            while set(vllm.steps()) == known and time.monotonic() < deadline:
                serving.generate(2)
            reading.result()
    (new,) = set(vllm.steps()) - known
    assert vllm.passes(new) == 2


def test_sglang_answers_a_request_with_its_own_fields(
    serving: Serving, sglang: servers.Server, batches: list[Any]
) -> None:
    theirs = sglang.folder / "theirs"
    body = {"output_dir": str(theirs), "activities": ["CPU"], "with_stack": False}
    # The request ends autoprof's capture, and SGLang itself answers it and stops its profile.
    assert sglang.post("/start_profile", {"global_step": 1114})[0] == 200
    serving.generate()
    status, answer = sglang.post("/start_profile", body)
    assert (status, "Start profiling" in str(answer)) == (200, True)
    assert sglang.meta(1114)["reason"] == "another caller started the engine's profiler"
    serving.generate()
    assert sglang.post("/start_profile", {"global_step": 1115})[0] == 409
    status, answer = sglang.post("/stop_profile")
    assert (status, "Stop profiling" in str(answer)) == (200, True)
    assert len(list(theirs.glob("*.trace.json.gz"))) == 1
    assert 1115 not in sglang.steps()
    # After that, requests open autoprof's windows again.
    assert serving.window(1116) == batches[0]


def test_a_profile_of_sglang_that_ended_automatically_needs_no_stop(
    serving: Serving, sglang: servers.Server, batches: list[Any]
) -> None:
    theirs = sglang.folder / "theirs-bounded"
    body = {"output_dir": str(theirs), "activities": ["CPU"], "with_stack": False, "num_steps": 3}
    assert sglang.post("/start_profile", body)[0] == 200
    assert serving.generate() == batches[0]
    assert list(theirs.glob("*.trace.json.gz"))
    assert serving.window(1120) == batches[0]


def test_health_checks_are_not_batches(serving: Serving, sglang: servers.Server) -> None:
    serving.generate()
    serving.generate()
    known = len(sglang.spans())
    for _ in range(2):
        assert sglang.post("/health_generate", method="GET")[0] == 200
    assert len(sglang.spans()) - known in (0, 1)


def test_autoprof_has_no_errors_and_no_hook_failed(
    serving: Serving, server: servers.Server, batches: list[Any]
) -> None:
    serving.generate()
    assert server.errors() == []
    assert list(server.folder.rglob("*.part")) == []


def test_a_batch_ends_when_its_last_client_goes_away(
    serving: Serving, server: servers.Server, batches: list[Any]
) -> None:
    began = time.time_ns()
    # No test with SGLang follows, because SGLang 0.5.8 may continue to generate for a while.
    with serving.streaming():
        pass
    server.batch_since(began)
    assert serving.generate() == batches[0]


@pytest.mark.fault(
    "vLLM's engine core is killed", "its requests fail, the server ends", "nothing; doctor names the core"
)
def test_a_killed_engine_core_is_named_although_the_server_ends_with_status_0(vllm: servers.Server) -> None:
    hooks = {process["pid"]: process["hooks"] for process in processes_of(vllm.run())}
    (core,) = [pid for pid, found in hooks.items() if found.get("vllm/engine-core", {}).get("called")]
    kill_in_a_batch(Serving(vllm, "vllm"), core)
    deadline = time.monotonic() + 60
    while (state := json.loads((vllm.run() / "run.json").read_text())["state"]) == "running":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    output = doctor(vllm)
    assert (state, f"vLLM's EngineCore (pid {core}) was killed by SIGKILL in step " in output) == ("ended", True), (
        output
    )
    assert "16 requests failed" in output


@pytest.mark.fault("SGLang's scheduler is killed", "the server kills itself", "nothing; doctor names the scheduler")
def test_a_killed_scheduler_is_named_and_not_the_server_that_then_kills_itself(sglang: servers.Server) -> None:
    found = processes_of(sglang.run())
    if found[0]["versions"]["sglang"] == "0.5.8":
        pytest.skip("this release does not watch its processes")
    (scheduler,) = [process["pid"] for process in found if process["hooks"].get("sglang/pass", {}).get("called")]
    kill_in_a_batch(Serving(sglang, "sglang-0.5.23"), scheduler)
    deadline = time.monotonic() + 60
    while "SGLang's scheduler_0" not in (output := doctor(sglang)) or "then: the process that started" not in output:
        assert time.monotonic() < deadline, output
        time.sleep(0.5)
    first = f"SGLang's scheduler_0 (pid {scheduler}) was killed by SIGKILL in step "
    assert output.index(first) < output.index("then: the process that started the run vanished in step ")


def kill_in_a_batch(serving: Serving, pid: int) -> None:
    """Kill a process of an engine while a batch is open. The process generates no token of the batch."""
    run = serving.server.run()
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(serving.read_to_the_end)
        deadline = time.monotonic() + 30
        while "step" not in dict(judged_runs.opened(run)) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)


def doctor(server: servers.Server) -> str:
    command = [sys.executable, "-m", "autoprof", "doctor", str(server.run())]
    return subprocess.run(command, capture_output=True, text=True, env=clean_environment()).stdout
