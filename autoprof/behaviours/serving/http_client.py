"""Rollout engines in servers that somebody else started, which the trainer reaches over HTTP.

Such a server has a run of its own. Where it runs with autoprof too, it has a route `/autoprof` (`http_server.py`): the
trainer says that it leads, so that the server's batches are no steps, and in which steps the engine is captured.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import NamedTuple

from autoprof.base import interrupts, log, process
from autoprof.behaviours.rollout.request import ROLE, Request
from autoprof.behaviours.trainer.running import in_whole
from autoprof.capture.artifacts import Artifacts
from autoprof.capture.profilers.torch import TorchTool
from autoprof.config.kinds import GENERATE
from autoprof.config.settings import Settings
from autoprof.hooks.attribute_path import CallPath
from autoprof.hooks.behaviour import Behaviour
from autoprof.hooks.call import CALL, Around, Call
from autoprof.hooks.waits import InThread
from autoprof.run import runtime
from autoprof.run.cluster import current_step


class _State(process.State):
    """The servers that know that this trainer leads, or could not be told."""

    def begin(self) -> None:
        self.told: set[str] = set()


_state = _State()

# An answer is a line or two.
_MOST_BYTES = 1 << 16


class _Answer(NamedTuple):
    """Answer of a server: its problem, or an empty text; its run directory; whether it surely did not act."""

    problem: str
    directory: str = ""
    refused: bool = False


class OverHttp(Behaviour):
    """The call has a server generate, over HTTP: in a step that is captured, its engine is captured in its own run.

    Attributes:
        url: Path to the server's address, such as `http://localhost:8000`.
    """

    url: CallPath

    def around(self, call: Call) -> Around:
        run = runtime.current()
        if run is None:
            yield CALL
            return None
        url = str(call.at(self.url)).rstrip("/")
        if url not in _state.told:
            _state.told.add(url)
            yield InThread(_ask, url, Request(action="lead"), run.settings)
        _, posting = current_step.own()
        if posting is None or not posting.captured or in_whole():
            yield CALL
            return None
        settings = run.settings.overridden(posting.overrides)
        if not settings.takes_role(ROLE, GENERATE):
            yield CALL
            return None
        request = Request(action="start", step=posting.step)
        start = yield InThread(_ask, url, request, settings)
        yield CALL
        problem = start.problem
        # A start that was not answered in time may come to pass all the same.
        if not start.refused:
            stop = yield InThread(_ask, url, Request(action="stop"), settings)
            problem = problem or stop.problem
        if problem:
            Artifacts(run, request.subject("engine"), settings.for_role(ROLE), TorchTool()).fail(f"{url}: {problem}")
        else:
            log.info(f"step {posting.step}: its rollout is in the run of {url}, {start.directory}")
        return None


def _ask(url: str, request: Request, settings: Settings) -> _Answer:
    post = urllib.request.Request(f"{url}/autoprof", request.body(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(post, timeout=settings.stop_timeout_s) as response:
            answer = json.loads(response.read(_MOST_BYTES))
    except urllib.error.HTTPError as error:
        if error.code in (404, 405):
            without = "the server runs without autoprof; put AUTOPROF=1 in front of its command as well"
            return _Answer(without, refused=True)
        said = error.read(500).decode(errors="replace")
        return _Answer(f"it answered HTTP {error.code}: {said}", refused=True)
    except (OSError, ValueError, HTTPException) as error:
        interrupts.pass_on(error)
        return _Answer(f"{type(error).__name__}: {error}")
    if not isinstance(answer, dict) or "problem" not in answer:
        return _Answer(f"it answered {str(answer)[:100]}, which is not an answer from autoprof", refused=True)
    return _Answer(str(answer["problem"]), str(answer.get("run", "")))
