"""A trainer with a rollout engine in another run's server: its requests to the server, and failing requests."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import Python
from tests.support.recipe_texts import recipe
from tests.support.small_trainer import metas

TRAINER = """
class Client:
    base_url = "http://127.0.0.1:9"
    def generate(self, prompt):
        if prompt is None:
            raise KeyError("the user's own")
        asked.append("generate")
        return prompt

class Trainer:
    client = Client()
    def step(self, number):
        return self.client.generate(number)
    def evaluate(self):
        return self.client.generate(0)

asked = []
"""
RECIPE = recipe(
    "trainer",
    ("step", "Trainer.step", "step.wrap", 'number = "number"'),
    ("evaluate", "Trainer.evaluate", "span", 'stage = "evaluate", role = "trainer", whole = true'),
    ("generate", "Client.generate", "rollout.http", 'url = "self.base_url"'),
)
SERVER = """
import json, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import trainer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        trainer.asked.append([self.path, body])
        if body["action"] == "lead":
            from pathlib import Path
            assert Path(body.pop("run")).samefile("autoprof_runs/latest")
        status, content = answer(body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)
    def log_message(self, *args): pass

def answer(body):
    return 200, json.dumps({"problem": "", "run": "/runs/server"}).encode()

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
trainer.Client.base_url = f"http://127.0.0.1:{server.server_port}/"
"""
STEPS = """
one = trainer.Trainer()
one.evaluate()
assert [one.step(number) for number in (1, 2, 3)] == [1, 2, 3]
one.evaluate()
print(json.dumps(trainer.asked))
"""


@pytest.fixture
def drive(tmp_path: Path, python: Python) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code with the trainer and its recipe, step 2 captured."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "trainer.toml").write_text(RECIPE)
    variables = {"AUTOPROF": "1", "AUTOPROF_STEPS": "2", "AUTOPROF_RECIPES": str(tmp_path / "trainer.toml")}
    return lambda code, **others: python(code, **variables | others, PYTHONPATH=str(tmp_path))


def test_the_server_gets_one_lead_request_and_then_requests_around_the_captured_step(
    tmp_path: Path, drive: Any
) -> None:
    finished = drive(SERVER + STEPS, AUTOPROF_LOG="info")
    lead, start, stop = [["/autoprof", {"action": action}] for action in ("lead", "start", "stop")]
    start[1]["global_step"] = 2
    one = "generate"
    assert json.loads(finished.stdout) == [lead, one, one, start, one, stop, one, one]
    assert "step 2: its rollout is in the run of http://127.0.0.1:" in finished.stderr
    assert "/runs/server" in finished.stderr
    assert metas(tmp_path) == []


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("404, b''", "the server runs without autoprof; put AUTOPROF=1 in front of its command as well"),
        ("500, b'some trouble'", "it answered HTTP 500: some trouble"),
        ("200, b'[1'", "JSONDecodeError"),
        ("200, b'[]'", "it answered []"),
        ("200, b'{}'", "it answered {}"),
        ("409, json.dumps({'problem': 'a window is open already'}).encode()", "a window is open already"),
    ],
)
def test_the_meta_file_names_the_problem_of_a_server(tmp_path: Path, drive: Any, answer: str, problem: str) -> None:
    finished = drive(SERVER + f"def answer(body):\n    return {answer}\n" + STEPS)
    asked = json.loads(finished.stdout)
    assert [line for line in asked if line == "generate"] == ["generate"] * 5
    # Without an answer, the server may still have begun a recording.
    actions = ["lead", "start", "stop"] if problem == "JSONDecodeError" else ["lead", "start"]
    assert [line[1]["action"] for line in asked if line != "generate"] == actions
    (meta,) = metas(tmp_path)
    assert (meta["state"], meta["step"], meta["role"], meta["part"]) == ("failed", 2, "rollout", "engine")
    assert problem in meta["reason"]


def test_without_the_server_only_the_capture_is_lost(tmp_path: Path, drive: Any) -> None:
    finished = drive("import json, trainer" + STEPS)
    assert json.loads(finished.stdout) == ["generate"] * 5
    (meta,) = metas(tmp_path)
    assert "http://127.0.0.1:9: URLError" in meta["reason"]


def test_a_start_that_is_answered_too_late_is_stopped(tmp_path: Path, drive: Any) -> None:
    code = """
def answer(body):
    if body["action"] == "start":
        late.wait()
    return 200, b'{"problem": ""}'
late = threading.Event()
"""
    finished = drive(SERVER + code + STEPS + "late.set()", AUTOPROF_STOP_TIMEOUT_S="0.5")
    actions = [line[1]["action"] for line in json.loads(finished.stdout) if line != "generate"]
    assert actions == ["lead", "start", "stop"]
    (meta,) = metas(tmp_path)
    assert "TimeoutError" in meta["reason"]


def test_a_failed_stop_is_in_the_meta_file(tmp_path: Path, drive: Any) -> None:
    code = "def answer(body):\n    return 200, json.dumps({'problem': 'late' * (body['action'] == 'stop')}).encode()\n"
    drive(SERVER + code + STEPS)
    (meta,) = metas(tmp_path)
    assert meta["reason"].endswith(": late")


def test_an_exception_of_the_users_passes_and_the_server_is_stopped(tmp_path: Path, drive: Any) -> None:
    code = """
class Failing(trainer.Client):
    def generate(self, prompt):
        return super().generate(None)
trainer.Trainer.client = Failing()
try:
    trainer.Trainer().step(2)
except KeyError as error:
    assert error.args == ("the user's own",)
    print(json.dumps(trainer.asked))
"""
    finished = drive(SERVER + code)
    assert [line[1]["action"] for line in json.loads(finished.stdout)] == ["lead", "start", "stop"]


def test_an_unselected_role_is_not_captured(drive: Any) -> None:
    finished = drive(SERVER + STEPS, AUTOPROF_ROLES="actor")
    assert [line[1]["action"] for line in json.loads(finished.stdout) if line != "generate"] == ["lead"]


# A trainer whose servers generate while it learns, until it pauses them before the weights change.
ASYNCHRONOUS = """
class Server:
    def __init__(self, host, port):
        self.host, self.port = host, port

class Trainer:
    servers = []
    def step(self, number):
        self.take()
        asked.append("update")
        self.pause()
        asked.append("weights")
    def take(self): ...
    def pause(self): ...

asked = []
"""
BOTH_ENDS = recipe(
    "trainer",
    ("step", "Trainer.step", "step.wrap", 'number = "number"'),
    ("take", "Trainer.take", "rollout.http", 'url = "self.servers", part = "begin"'),
    ("pause", "Trainer.pause", "rollout.http", 'url = "self.servers", part = "end"'),
)
SERVERS = """
trainer.Client = Client
host, port = server.server_address
trainer.Trainer.servers = [trainer.Server(host, port), f"localhost:{port}"]
for number in (1, 2, 3):
    trainer.Trainer().step(number)
print(json.dumps(trainer.asked))
"""


@pytest.fixture
def asked_of_two(tmp_path: Path, drive: Any) -> Callable[..., list[Any]]:
    """Run the asynchronous trainer with two servers. Return their requests, and the trainer's actions between them."""
    (tmp_path / "trainer.py").write_text(ASYNCHRONOUS)
    (tmp_path / "trainer.toml").write_text(BOTH_ENDS)
    server = SERVER.replace("trainer.Client.base_url = ", "base_url = ")
    code = server + SERVERS.replace("trainer.Client = Client\n", "")
    return lambda **variables: [  # type: ignore[no-any-return]
        each if isinstance(each, str) else each[1] for each in json.loads(drive(code, **variables).stdout)
    ]


def test_between_two_calls_the_first_server_is_captured(asked_of_two: Any) -> None:
    lead, start, stop = {"action": "lead"}, {"action": "start", "global_step": 2}, {"action": "stop"}
    others = ["update", "weights"]
    assert asked_of_two() == [lead, lead, *others, start, "update", stop, "weights", *others]


def test_all_servers_are_captured_if_all_ranks_are(asked_of_two: Any) -> None:
    asked = asked_of_two(AUTOPROF_RANKS="all")
    first = {"action": "start", "global_step": 2}
    second = {**first, "replica": 1, "rank": 1}
    starts = asked[asked.index("weights") + 1 :][:2]
    assert sorted(starts, key=len) == [first, second]
    assert [each["action"] for each in asked if isinstance(each, dict)] == ["lead"] * 2 + ["start"] * 2 + ["stop"] * 2


def test_a_window_without_an_end_is_closed_by_the_next(tmp_path: Path, asked_of_two: Any) -> None:
    (tmp_path / "trainer.toml").write_text(BOTH_ENDS.replace("Trainer.pause", "Trainer.gone"))
    asked = asked_of_two(AUTOPROF_STEPS="1,2")
    actions = [each["action"] for each in asked if isinstance(each, dict)]
    assert actions == ["lead", "lead", "start", "stop", "start", "stop"]


@pytest.mark.parametrize("own", [True, False])
def test_settings_of_the_window_are_for_servers_of_the_same_run(tmp_path: Path, drive: Any, own: bool) -> None:
    code = f"""
from autoprof.windows.chooser import Chooser
Chooser.choose = lambda self, settings, step, step_in_run: {{"contents": "cpu"}} if step == 2 else None
def answer(body):
    from autoprof.run import runtime
    directory = str(runtime.current().rundir.path) if {own} else "/runs/server"
    return 200, json.dumps({{"problem": "", "run": directory}}).encode()
"""
    asked = json.loads(drive(SERVER + code + STEPS).stdout)
    (start,) = [line[1] for line in asked if line != "generate" and line[1]["action"] == "start"]
    assert start == {"action": "start", "global_step": 2} | ({"overrides": {"contents": "cpu"}} if own else {})
