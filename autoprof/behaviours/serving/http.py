"""HTTP requests of a trainer to an inference server, if autoprof runs in both.

A server has its own run. autoprof adds a route `/autoprof` to the server. By this route, the trainer takes control of
the server's windows, and starts and stops captures.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Sequence
from concurrent.futures.thread import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any, Literal, NamedTuple

from autoprof.base import log, process, seam, threads
from autoprof.base.originals import json
from autoprof.behaviours.rollout.engine import ROLE, Request
from autoprof.behaviours.serving import server as serving
from autoprof.behaviours.trainer.running import in_whole
from autoprof.capture.profilers.torch import TorchTool
from autoprof.capture.recorder import Capture
from autoprof.config.kinds import GENERATE
from autoprof.config.settings import Settings
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, CallPath, Wait
from autoprof.hooks.dispatch import InThread
from autoprof.run import runtime, step_announcement

# Fields that autoprof reads from the body of `/start_profile`.
KEYS = frozenset({"global_step", "duration_s"})


async def answer_start(server: serving.ServedEngine, body: bytes) -> tuple[int, dict[str, str]]:
    """Handle `/start_profile`. Return the HTTP status and the content of the response."""
    try:
        step, duration_s = window_of(body)
    except ValueError as error:
        seam.pass_on(error)
        return 400, {"problem": str(error)}
    return _answer(await server.open_window(step, duration_s))


async def answer_stop(server: serving.ServedEngine) -> tuple[int, dict[str, str]]:
    """Handle `/stop_profile`. Return the HTTP status and the content of the response."""
    return _answer(await server.close_window())


async def answer_trainer(server: serving.ServedEngine, directory: str, body: bytes) -> tuple[int, dict[str, str]]:
    """Handle a trainer's request to `/autoprof`. Return the HTTP status and the content of the response.

    Args:
        server: Engine behind the server.
        directory: Run directory of the server.
        body: Body of the trainer's request.
    """
    try:
        request = Request.read(body)
    except ValueError as error:
        seam.pass_on(error)
        return 400, {"problem": str(error)}
    if request.action == "stop":
        return await answer_stop(server)
    if request.action == "start":
        status, content = _answer(await server.open_window(request=request))
        return status, content | {"run": directory}
    server.follow(same_run=request.run == directory)
    return 200, {"problem": "", "run": directory}


def window_of(body: bytes) -> tuple[int | None, float | None]:
    """Return the step and the window's duration in seconds from the body of `/start_profile`.

    A value that the body does not contain is None.

    Raises:
        ValueError: A field is invalid. The message names the field, its value and the allowed values.
    """
    fields = fields_of(body)
    if fields is None:
        raise ValueError(f"body: got {body[:100].decode(errors='replace')!r}; it takes an object in JSON, or nothing")
    step, duration_s = fields.get("global_step"), fields.get("duration_s")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise ValueError(f"global_step: got {step!r}; it takes a whole number from 0")
    is_number = isinstance(duration_s, int | float) and not isinstance(duration_s, bool)
    if duration_s is not None and not (is_number and 0 < duration_s < 1e9):
        raise ValueError(f"duration_s: got {duration_s!r}; it takes seconds, above 0 and below 1e9")
    return step, duration_s


def fields_of(body: bytes) -> dict[str, Any] | None:
    """Return the fields of a body, {} for an empty body, or None if the body is not a JSON object."""
    try:
        content = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError) as error:
        seam.pass_on(error)
        return None
    return content if isinstance(content, dict) else None


def _answer(problem: str) -> tuple[int, dict[str, str]]:
    return 409 if problem else 200, {"problem": problem}


class _ClientState(process.State):
    """Inference servers that this trainer uses.

    Attributes:
        directories: Dict from the URL of each server that this trainer has contacted to the server's run directory.
        open: Window that the next call with `part = "begin"` or `"end"` closes, if any.
    """

    def begin(self) -> None:
        self.directories: dict[str, str] = {}
        self.open: _ServerWindow | None = None


_state = _ClientState()

# Maximum number of bytes that are read of a server's answer. An answer has about 100 bytes.
MAX_ANSWER_BYTES = 1 << 16
# Maximum number of servers that get a request at the same time.
MAX_PARALLEL_REQUESTS = 16


class _Answer(NamedTuple):
    """Answer of a server to a request.

    Attributes:
        problem: Problem of the server, or an empty string.
        directory: Run directory of the server, or an empty string.
        refused: True if the server has certainly not carried out the request.
    """

    problem: str
    directory: str = ""
    refused: bool = False


class OverHttp(Behaviour):
    """The call makes an HTTP server generate. In a captured step, the server's engine is captured, too.

    The capture is in the server's own run, which may be the trainer's run. If there are several servers, autoprof
    captures only the servers whose index in the list is selected by `AUTOPROF_RANKS`.

    Attributes:
        url: Path from a parameter of the call to the server's address, such as `http://localhost:8000` or
            `localhost:8000`, or to a list of addresses. An address may also be an object with a `host` and a `port`.
        part: `whole`: the server generates during the call. `begin`, `end`: the server generates between two calls, as
            in asynchronous training. The window lasts from the `begin` call to the `end` call, or to the next `begin`
            call.
    """

    url: CallPath
    part: Literal["whole", "begin", "end"] = "whole"

    def around(self, call: Call) -> Around:
        run = runtime.current()
        if run is None:
            yield CALL
            return None
        if self.part != "whole":
            earlier_window, _state.open = _state.open, None
            if earlier_window is not None:
                yield from earlier_window.close(run)
        window = None if self.part == "end" else (yield from self._open(run, call))
        if self.part == "begin":
            _state.open = window
        yield CALL
        if window is not None and self.part == "whole":
            yield from window.close(run)
        return None

    def _open(self, run: runtime.Runtime, call: Call) -> Generator[Wait, Any, _ServerWindow | None]:
        value = call.at(self.url)
        urls = [_url(address) for address in (value if isinstance(value, (list, tuple)) else [value])]
        new_urls = [url for url in urls if url not in _state.directories]
        _state.directories.update(dict.fromkeys(new_urls, ""))
        directory = str(run.rundir.path)
        lead = Request(action="lead", run=directory)
        answers = yield from _map(_ask, [(url, lead, run.settings) for url in new_urls])
        _state.directories.update({url: answer.directory for url, answer in zip(new_urls, answers, strict=True)})
        _, announcement = step_announcement.own()
        if announcement is None or not announcement.captured or in_whole():
            return None
        settings = run.settings.overridden(announcement.overrides)
        window = _ServerWindow(settings)
        for index, url in enumerate(urls):
            if _takes(settings, index, len(urls)):
                # A server with its own run uses its own settings.
                overrides = announcement.overrides if _state.directories[url] == directory else {}
                window.urls.append(url)
                window.requests.append(
                    Request(action="start", step=announcement.step, replica=index, rank=index, overrides=overrides)
                )
        requests = zip(window.urls, window.requests, strict=True)
        window.answers = yield from _map(_ask, [(url, request, settings) for url, request in requests])
        return window


class _ServerWindow:
    """Window of one step: the servers that were asked to start, the start and stop requests, and the answers."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.urls: list[str] = []
        self.requests: list[Request] = []
        self.answers: list[_Answer] = []

    def close(self, run: runtime.Runtime) -> Generator[Wait, Any, None]:
        """Stop the engines. For each server, log where its capture is, or write a meta file with the problem."""
        starts = list(zip(self.urls, self.requests, self.answers, strict=True))
        # If a start was not answered in time, the engine may start later. So the engine is stopped, too.
        urls_to_stop = [url for url, _, start in starts if not start.refused]
        stops = yield from _map(_ask, [(url, Request(action="stop"), self.settings) for url in urls_to_stop])
        stop_problems = {url: stop.problem for url, stop in zip(urls_to_stop, stops, strict=True)}
        for url, request, start in starts:
            if problem := start.problem or stop_problems.get(url, ""):
                subject = request.subject("engine")
                Capture(run, subject, self.settings.for_role(ROLE), TorchTool()).fail(f"{url}: {problem}")
            else:
                log.info(f"step {request.step}: its rollout is in the run of {url}, {start.directory}")


def _takes(settings: Settings, index: int, server_count: int) -> bool:
    """Return True if the settings select the server. `AUTOPROF_RANKS` selects servers by index if there are several."""
    if server_count == 1:
        return settings.takes_role(ROLE, GENERATE)
    return settings.takes(ROLE, range(index, index + 1), GENERATE)


def _url(address: Any) -> str:
    if not isinstance(address, str):
        host = str(address.host)
        address = f"[{host}]:{address.port}" if ":" in host else f"{host}:{address.port}"
    return (address if "://" in address else f"http://{address}").rstrip("/")


def _map(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> Generator[Wait, Any, list[Any]]:
    """Call the function with each tuple of arguments, all calls at the same time. Return the results in this order.

    The hooked call waits for the results.
    """
    if not calls:
        return []
    answers: list[Any] = yield InThread(_together, function, calls)
    return answers


def _together(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    if len(calls) == 1:
        return [function(*calls[0])]
    pool = ThreadPoolExecutor(min(len(calls), MAX_PARALLEL_REQUESTS), "autoprof-asking")
    try:
        return list(threads.start(pool.map, lambda arguments: function(*arguments), calls))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _ask(url: str, request: Request, settings: Settings) -> _Answer:
    post = urllib.request.Request(f"{url}/autoprof", request.body(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(post, timeout=settings.stop_timeout_s) as response:
            answer = json.loads(response.read(MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        if error.code in (404, 405):
            problem = "the server runs without autoprof; put AUTOPROF=1 in front of its command as well"
            return _Answer(problem, refused=True)
        content = error.read(500).decode(errors="replace")
        return _Answer(f"it answered HTTP {error.code}: {content}", refused=True)
    except (OSError, ValueError, HTTPException) as error:
        seam.pass_on(error)
        return _Answer(f"{type(error).__name__}: {error}")
    if not isinstance(answer, dict) or "problem" not in answer:
        return _Answer(f"it answered {str(answer)[:100]}, which is not an answer from autoprof", refused=True)
    return _Answer(str(answer["problem"]), str(answer.get("run", "")))
