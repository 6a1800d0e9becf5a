"""Rollout engines in servers that somebody else started, which the trainer reaches over HTTP.

Such a server has a run of its own. Where it runs with autoprof too, it has a route `/autoprof` (`serve_http.py`): the
trainer says that it leads, so that the server's batches are no steps, and in which steps the engine is captured.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any, NamedTuple

from autoprof import board, interrupts, log, runtime
from autoprof.behaviours import Behaviour
from autoprof.behaviours.rollout import ROLE
from autoprof.behaviours.running import in_whole
from autoprof.naming import Subject
from autoprof.paths import CallPath
from autoprof.placement import Placement
from autoprof.settings import Settings
from autoprof.tools.torch import TorchTool
from autoprof.waits import InThread
from autoprof.wrapping import CALL, Around, Call

# The servers that know that this trainer leads, or could not be told.
_told: set[str] = set()
# An answer is a line or two.
_MOST_BYTES = 1 << 16


class _Answer(NamedTuple):
    """What speaks against it, or an empty text; the server's run directory; whether it surely did not do it."""

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
        if url not in _told:
            _told.add(url)
            yield InThread(_ask, url, {"action": "lead"}, run.settings)
        _, posting = board.own()
        if posting is None or not posting.captured or in_whole():
            yield CALL
            return None
        settings = run.settings.overridden(posting.overrides)
        if not settings.takes_role(ROLE):
            yield CALL
            return None
        start = yield InThread(_ask, url, {"action": "start", "global_step": posting.step}, settings)
        yield CALL
        problem = start.problem
        # A start that was not answered in time may come to pass all the same.
        if not start.refused:
            stop = yield InThread(_ask, url, {"action": "stop"}, settings)
            problem = problem or stop.problem
        if problem:
            subject = Subject(step=posting.step, role=ROLE, stage=ROLE, rank=0, replica=0, part="engine")
            Placement(run, subject, settings.for_role(ROLE), TorchTool.name).fail(f"{url}: {problem}")
        else:
            log.info(f"step {posting.step}: its rollout is in the run of {url}, {start.directory}")
        return None


def _ask(url: str, content: dict[str, Any], settings: Settings) -> _Answer:
    request = urllib.request.Request(
        f"{url}/autoprof", json.dumps(content).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=settings.stop_timeout_s) as response:
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
        return _Answer(f"it answered {str(answer)[:100]}, which is no answer of autoprof's", refused=True)
    return _Answer(str(answer["problem"]), str(answer.get("run", "")))
