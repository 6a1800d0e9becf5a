"""SGLang's own server of each release under autoprof, without a trainer.

Windows open by number of the generation batch and by request, and close after a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import engines, processes, servers
from tests.support.helpers import clean_environment

HERE = Path(__file__).parent
# Command of each release. Newer releases recommend `sglang serve`.
FORMS = {"sglang-0.5.8": ["python", "-m", "sglang.launch_server"], "sglang-0.5.23": ["sglang", "serve"]}
OPTIONS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none --dtype float32 "
    "--max-total-tokens 1024 --max-running-requests 4 --mem-fraction-static 0.1 --host 127.0.0.1"
)

# Takes several seconds: 16 answers, four at a time.
LONG = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"max_new_tokens": 480, "temperature": 1, "ignore_eos": True, "n": 16},
    "stream": True,
}


def generate(server: servers.Server, tokens: int = 6, samples: int = 1) -> Any:
    """Generate, and return the token ids, as a list for each sample if there are several."""
    parameters = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, "n": samples}
    status, answer = server.post("/generate", {"input_ids": [5, 6, 7], "sampling_params": parameters})
    assert status == 200, answer
    return answer["output_ids"] if samples == 1 else [one["output_ids"] for one in answer]


@pytest.fixture(scope="module", params=[name for name in engines.NAMES if name.startswith("sglang-")])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    python = engines.python_of(request.param)
    folder = tmp_path_factory.mktemp("serve")
    environment = clean_environment(
        PYTHONPATH=str(HERE / "sglang_cpu"),
        SGLANG_USE_CPU_ENGINE="1",
        TORCHDYNAMO_DISABLE="1",
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        SGLANG_CPU_OMP_THREADS_BIND="0",
    )
    model = folder / "model"
    make = [python, str(HERE / "sglang_scripts" / "model.py"), str(model)]
    made = processes.run(make, cwd=folder, env=environment, timeout_s=120)
    assert made.status == 0, made.output[-4000:]
    port = servers.free_port()
    program, *form = FORMS[request.param]
    command = [
        str(Path(python).with_name(program)),
        *form,
        "--model-path",
        str(model),
        "--port",
        str(port),
        *OPTIONS.split(),
    ]
    yield from servers.running(
        servers.Server(folder, port, "aten::embedding"),
        command,
        environment | {"AUTOPROF": "1", "AUTOPROF_STEPS": "2,4"},
    )


@pytest.fixture(scope="module")
def batches(server: servers.Server) -> list[list[int]]:
    """Send five generation batches: the fourth has three concurrent requests, the others one request."""
    answers = [generate(server) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        answers += pool.map(lambda _: generate(server, 12), range(3))
    return [*answers, generate(server)]


def test_the_chosen_batches_are_captured(server: servers.Server, batches: list[list[int]]) -> None:
    assert server.passes(2) in (6, 7)
    assert server.passes(4) in range(12, 40)
    assert [step for step in server.steps() if step < 1000] == [2, 4]
    assert {tuple(answer[:6]) for answer in batches} == {tuple(batches[0])}


def test_every_batch_is_a_step_of_the_timeline(server: servers.Server, batches: list[list[int]]) -> None:
    # SGLang's own warm-up request is not a step.
    assert [span["step"] for span in server.spans()][:5] == [1, 2, 3, 4, 5]


def test_samples_of_one_prompt_are_one_batch(server: servers.Server, batches: list[list[int]]) -> None:
    known = len(server.spans())
    assert generate(server, samples=3) == [batches[0]] * 3
    generate(server)
    assert [span["step"] for span in server.spans()][known:][:1] == [known + 1]
    assert len(server.spans()) in (known + 1, known + 2)


def test_a_request_opens_a_window_and_can_name_the_step(server: servers.Server, batches: list[list[int]]) -> None:
    assert server.post("/start_profile", {"global_step": 1107}) == (200, {"problem": ""})
    assert generate(server) == generate(server) == batches[0]
    assert server.post("/stop_profile") == (200, {"problem": ""})
    assert server.passes(1107) in range(12, 16)


def test_a_window_opens_in_the_middle_of_a_batch(server: servers.Server, batches: list[list[int]]) -> None:
    known = set(server.steps())
    began = time.time_ns()
    with server.streaming("/generate", LONG) as answer:
        assert server.post("/start_profile") == (200, {"problem": ""})
        answer.read()
    assert server.post("/stop_profile") == (200, {"problem": ""})
    # The window has the number of the batch in which it was opened.
    (new,) = set(server.steps()) - known
    assert server.passes(new) in range(1, 101)
    assert server.batch_since(began) == new


def test_a_window_closes_after_its_time(server: servers.Server, batches: list[list[int]]) -> None:
    assert server.post("/start_profile", {"global_step": 1111, "duration_s": 3}) == (200, {"problem": ""})
    assert generate(server) == batches[0]
    assert server.passes(1111) in (6, 7)
    assert server.post("/stop_profile") == (409, {"problem": "no window is open"})
    # A window that was stopped early is not closed again when its time is over.
    assert server.post("/start_profile", {"global_step": 1112, "duration_s": 0.5})[0] == 200
    assert server.post("/stop_profile")[0] in (200, 409)
    assert server.post("/start_profile", {"global_step": 1113, "duration_s": 600})[0] == 200
    assert generate(server) == batches[0]
    assert server.post("/stop_profile") == (200, {"problem": ""})
    assert server.passes(1113) in (6, 7)


def test_requests_out_of_order_are_refused_and_the_server_still_works(
    server: servers.Server, batches: list[list[int]]
) -> None:
    assert server.post("/stop_profile") == (409, {"problem": "no window is open"})
    assert server.post("/start_profile", {"global_step": 1108})[0] == 200
    assert server.post("/start_profile", {"global_step": 1109}) == (409, {"problem": "a window is open already"})
    assert generate(server) == batches[0]
    assert server.post("/stop_profile")[0] == 200
    assert server.post("/stop_profile")[0] == 409
    status, answer = server.post("/start_profile", {"duration_s": -1})
    assert (status, answer["problem"]) == (400, "duration_s: got -1; it takes seconds, above 0 and below 1e9")
    assert generate(server) == batches[0]
    assert 1109 not in server.steps()


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_request_without_a_body_opens_a_window(server: servers.Server, batches: list[list[int]], method: str) -> None:
    known = set(server.steps())
    assert server.post("/start_profile", method=method) == (200, {"problem": ""})
    generate(server)
    assert server.post("/stop_profile", method=method) == (200, {"problem": ""})
    (new,) = set(server.steps()) - known
    assert 5 < new < 1000


def test_sglang_answers_a_request_with_its_own_fields(server: servers.Server, batches: list[list[int]]) -> None:
    theirs = server.folder / "theirs"
    body = {"output_dir": str(theirs), "activities": ["CPU"], "with_stack": False}
    # The request ends autoprof's capture, and SGLang itself answers it and stops its profile.
    assert server.post("/start_profile", {"global_step": 1114})[0] == 200
    generate(server)
    status, answer = server.post("/start_profile", body)
    assert (status, "Start profiling" in str(answer)) == (200, True)
    assert server.meta(1114)["reason"] == "another caller started the engine's profiler"
    generate(server)
    assert server.post("/start_profile", {"global_step": 1115})[0] == 409
    status, answer = server.post("/stop_profile")
    assert (status, "Stop profiling" in str(answer)) == (200, True)
    assert len(list(theirs.glob("*.trace.json.gz"))) == 1
    assert 1115 not in server.steps()
    # After that, requests open autoprof's windows again.
    assert server.post("/start_profile", {"global_step": 1116})[0] == 200
    assert generate(server) == batches[0]
    assert server.post("/stop_profile") == (200, {"problem": ""})
    assert server.passes(1116) in (6, 7)


def test_a_profile_of_sglang_that_ended_automatically_needs_no_stop(
    server: servers.Server, batches: list[list[int]]
) -> None:
    theirs = server.folder / "theirs-bounded"
    body = {"output_dir": str(theirs), "activities": ["CPU"], "with_stack": False, "num_steps": 3}
    assert server.post("/start_profile", body)[0] == 200
    assert generate(server) == batches[0]
    assert list(theirs.glob("*.trace.json.gz"))
    assert server.post("/start_profile", {"global_step": 1120}) == (200, {"problem": ""})
    assert generate(server) == batches[0]
    assert server.post("/stop_profile") == (200, {"problem": ""})
    assert server.passes(1120) in (6, 7)


def test_sglang_answers_a_body_that_is_not_json(server: servers.Server, batches: list[list[int]]) -> None:
    status, _ = server.post("/start_profile", b"{")
    assert status in (400, 422)
    assert server.post("/stop_profile")[0] >= 400
    assert server.post("/stop_profile") == (409, {"problem": "no window is open"})


def test_health_checks_are_not_batches(server: servers.Server, batches: list[list[int]]) -> None:
    generate(server)
    generate(server)
    known = len(server.spans())
    for _ in range(2):
        assert server.post("/health_generate", method="GET")[0] == 200
    assert len(server.spans()) - known in (0, 1)


def test_autoprof_has_no_errors_and_no_hook_failed(server: servers.Server, batches: list[list[int]]) -> None:
    generate(server)
    assert server.errors() == []
    assert list(server.folder.rglob("*.part")) == []


def test_a_batch_ends_when_its_last_client_goes_away(server: servers.Server, batches: list[list[int]]) -> None:
    began = time.time_ns()
    # This is the last test, because SGLang 0.5.8 may continue to generate for a while.
    with server.streaming("/generate", LONG):
        pass
    server.batch_since(began)
    assert generate(server) == batches[0]
