"""Engines without a trainer in their process: their steps and windows, and the HTTP requests of a trainer to a server.

A step is a generation batch, or a window that a user requests. A batch lasts from the first request to an idle engine
until the engine has no request left. Batches are counted from 1.

A server has its own run. autoprof adds a route `/autoprof` to the server. By this route, the trainer takes control of
the server's windows, and starts and stops captures.
"""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from concurrent.futures.thread import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any, Literal, NamedTuple

import msgspec

from autoprof.base import log, process, seam
from autoprof.base.originals import json, time
from autoprof.behaviours.rollout import ROLE, Request, awaited_problem
from autoprof.behaviours.stages import in_whole_span
from autoprof.capture.profilers.torch import TorchTool
from autoprof.capture.recorder import Capture
from autoprof.config.settings import Settings
from autoprof.config.values import GENERATE, REASON
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, CallPath, Wait
from autoprof.hooks.dispatch import InThread
from autoprof.run import cluster, end, runtime
from autoprof.run.journal import Span
from autoprof.windows.chooser import Chooser

# A request to a busy server causes a new look for requests of `autoprof trigger`, if the last look is more than this
# number of seconds ago.
LOOK_INTERVAL_S = 1.0
# Reason in meta files of recordings that end because the user profiles the engine.
ANOTHER_CALLER = "another caller started the engine's profiler"


# Functions that start and stop an engine's recording. They return `{"problem": text}`; the text is empty on success.
# The string argument of a stop is the reason why the recording ends early, or an empty string.
Start = Callable[[Any, Request], Awaitable[dict[str, Any]]]
Stop = Callable[[Any, str], Awaitable[dict[str, Any]]]


class Batches:
    """Generation batches of one engine, which are steps on the timeline, and the recordings of the batches.

    Attributes:
        count: Number of batches begun.
        are_steps: False if a trainer of the same run counts the steps and takes the requests of `autoprof trigger`.
        captured: True while the engine records a batch.
        outputs: Number of outputs of the engine, if no other function shows that the engine works.
    """

    def __init__(self, engine: Any, start: Start, stop: Stop, work: Callable[[], object] | None = None) -> None:
        """Args:
        engine: The engine.
        start: Function that starts a recording.
        stop: Function that stops a recording.
        work: Function whose result changes while the engine works. It must not refer to an engine that a script may
            delete. Default: the number of outputs.
        """
        self.count = 0
        self.outputs: Counter[str] = Counter()
        self._work = work or self.outputs.total
        self.are_steps = True
        self.captured = False
        self._engine = engine
        self._start = start
        self._stop = stop
        self._span: Span | None = None
        self._last_window = False
        self._chooser = Chooser()
        self._last_look = 0.0

    @property
    def is_open(self) -> bool:
        """Return whether a batch has begun and not ended."""
        return self._span is not None

    @property
    def overdue(self) -> bool:
        """Return True if the last look for requests of `autoprof trigger` is more than LOOK_INTERVAL_S ago."""
        return time.monotonic() - self._last_look > LOOK_INTERVAL_S

    def look(self, run: runtime.Runtime, trainer_decides: bool = False) -> None:
        """Take the requests of `autoprof trigger`. In these requests, step `+1` means the open or else the next batch.

        Args:
            run: Run of this process.
            trainer_decides: True if a trainer opens the engine's windows. Then the requests are refused.
        """
        self._last_look = time.monotonic()
        if not self.are_steps:  # the trainer takes the requests
            return
        self._chooser.look(run.rundir, self.count + (not self.is_open))
        if trainer_decides:
            self._chooser.close("a trainer decides what this server records; use autoprof trigger on the trainer's run")

    def asked(self, run: runtime.Runtime) -> Request | None:
        """Return the request that starts the engine's recording if a trigger selects the open batch, or else None."""
        overrides = self._chooser.asked(run.settings, self.count)
        return None if overrides is None else self._request(overrides)

    def begin(self, run: runtime.Runtime) -> Request | None:
        """Begin a batch.

        Return the request that starts the engine's recording if `AUTOPROF_STEPS`, a condition or a trigger selects the
        batch. Otherwise, return None.
        """
        self.count += 1
        # Numbers of batches must not be confused with steps of the trainer.
        kind = "step" if self.are_steps else "batch"
        self._span = Span(run.timeline, kind, kind, step=self.count, role=ROLE, rank=None)
        run.timeline.watch_work(self._work)
        if not self.are_steps:
            return None
        self._chooser.step_began(run, self.count, self.count)
        overrides = self._chooser.choose(run.settings, self.count, self.count)
        if overrides is None:
            return None
        self._last_window = not self._chooser.any_after(run.settings, self.count, self.count)
        return self._request(overrides)

    def end(self) -> None:
        """End the batch. The caller must have stopped the recording of the batch."""
        span, self._span = self._span, None
        if span is not None and self.are_steps:
            span.end()
            self._chooser.step_ended(self.count, self.count)
        elif span is not None:
            span.drop()
        self._chooser.ended()
        run = runtime.current()
        if self._last_window and run is not None:
            self._last_window = False
            end.window_passed(run)

    async def capture(self, request: Request) -> None:
        """Start the recording of the open batch."""
        self.captured = not await self.start(request)

    async def finish(self, cut: str = "") -> None:
        """Stop the recording of the batch, if any.

        Args:
            cut: Reason why the recording ends early. Empty if the recording ends normally.
        """
        captured, self.captured = self.captured, False
        if captured:
            await self.stop(cut)

    async def start(self, request: Request) -> str:
        """Send a start request to the engine. Return the engine's problem, or an empty string."""
        return await _problem_of(self._start(self._engine, request))

    async def stop(self, cut: str = "") -> str:
        """Send a stop to the engine. Return the engine's problem, or an empty string.

        Args:
            cut: Reason why the recording ends early. Empty if the recording ends normally.
        """
        return await _problem_of(self._stop(self._engine, cut))

    def _request(self, overrides: dict[str, Any]) -> Request:
        return Request(action="start", step=self.count, overrides=overrides)


def begin_serving() -> None:
    """Tell the watcher that this process waits for requests. Without a request, an engine begins no batch."""
    if (run := runtime.current()) is not None:
        run.timeline.watch_work(lambda: None)


class ServedEngine:
    """The engine behind a server, and the recording of the engine: of a batch, or of a requested window."""

    def __init__(self, engine: Any, start: Start, stop: Stop, work: Callable[[], object] | None = None) -> None:
        self._batches = Batches(engine, start, stop, work)
        # True if the last request of the batch is finished, and a task is about to end the batch.
        self._over = False
        # True if a trainer opens the windows of the engine. Then batches are counted, but not captured.
        self._led = False
        self._waiting = 0
        # Requested window that is open, if any. Each window is a new object, so that a late timer can't close a later
        # window.
        self._window: object | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Requests that arrive while a recording starts or stops wait for this lock, so that the recording contains the
        # requests.
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[str]] = set()

    async def request(self, run: runtime.Runtime) -> None:
        """Handle a request to the engine. If the engine is idle, begin a batch.

        If the batch is selected, the engine already records when this coroutine returns.
        """
        must_look = not self._busy or self._batches.overdue
        if not must_look and not self._lock.locked():
            return
        self._waiting += 1
        try:
            await self._uninterrupted(self._handle_request(run, must_look))
        finally:
            self._waiting -= 1

    def put_out(self) -> None:
        """Count an output of the engine."""
        self._batches.outputs["outputs"] += 1

    def idle(self) -> None:
        """End the batch, because the engine has no request left. The caller runs in the engine's event loop."""
        # While the first request of a new batch waits for the recording, a late output of the previous batch must not
        # end the new batch.
        if self._busy and not self._waiting:
            self._over = True
            self._spawn(self._end_over())

    def follow(self, same_run: bool = False) -> None:
        """Let a trainer open all windows. From now on, the engine records only in the trainer's windows.

        Args:
            same_run: True if the trainer and the server belong to the same run. Then the trainer counts the steps.
        """
        self._led = True
        self._batches.are_steps = not same_run

    async def open_window(
        self, step: int | None = None, duration_s: float | None = None, request: Request | None = None
    ) -> str:
        """Start a recording now, even if the engine is idle.

        Args:
            step: Step for the folder's name. Default: the number of the open batch, or else of the next batch.
            duration_s: Seconds after which the window closes automatically. Default: the window stays open until
                `close_window` is called.
            request: Request of a trainer. Then the step in the request replaces `step`.

        Returns:
            The reason why the engine does not record, or an empty string.
        """
        return await self._uninterrupted(self._open_window(step, duration_s, request))

    async def close_window(self) -> str:
        """Close the requested window. Return the problem, or an empty string."""
        return await self._uninterrupted(self._close_window(self._window))

    async def give_way(self) -> None:
        """End autoprof's recording early, because another caller is about to profile the engine."""
        await self._uninterrupted(self._give_way())

    @property
    def step(self) -> int | None:
        """Return the number of the open batch if batches are steps, or else None."""
        return self._batches.count if self._busy and self._batches.are_steps else None

    @property
    def _busy(self) -> bool:
        return self._batches.is_open and not self._over

    async def _handle_request(self, run: runtime.Runtime, must_look: bool) -> str:
        async with self._lock:
            if self._busy and not must_look:
                return ""
            if not self._busy:
                await self._end_batch()
            await asyncio.to_thread(self._batches.look, run, self._led)
            request = self._batches.asked(run) if self._busy else self._batches.begin(run)
            if request is not None and not self._led and self._window is None and not self._batches.captured:
                await self._batches.capture(request)
        return ""

    async def _end_over(self) -> str:
        async with self._lock:
            if self._over:
                await self._end_batch()
        return ""

    async def _end_batch(self) -> None:
        self._over = False
        await self._batches.finish()
        self._batches.end()

    async def _open_window(self, step: int | None, duration_s: float | None, request: Request | None) -> str:
        async with self._lock:
            if self._over:
                await self._end_batch()
            if self._window is not None or self._batches.captured:
                return "a window is open already"
            number = self._batches.count + (not self._busy) if step is None else step
            request = request or Request(action="start", step=number, overrides={REASON: "/start_profile"})
            problem = await self._batches.start(request)
            if problem:
                return problem
            window = self._window = object()
            if duration_s is not None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(duration_s, lambda: self._spawn(self._close_window(window)))
            return ""

    async def _give_way(self) -> str:
        async with self._lock:
            recording = self._batches.captured or self._window is not None
            self._forget_window()
            self._batches.captured = False
            return await self._batches.stop(ANOTHER_CALLER) if recording else ""

    async def _close_window(self, window: object | None) -> str:
        async with self._lock:
            if window is None or self._window is not window:
                return "no window is open"
            self._forget_window()
            return await self._batches.stop()

    def _forget_window(self) -> None:
        self._window = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _uninterrupted(self, work: Coroutine[Any, Any, str]) -> str:
        # If the caller is cancelled, the work continues. Otherwise, the start of an engine could remain incomplete.
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, str]) -> asyncio.Task[str]:
        task = asyncio.get_running_loop().create_task(awaited_problem("serve", work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _problem_of(answer: Awaitable[dict[str, Any]]) -> str:
    """Await an engine's answer. Log and return the problem in the answer, or return an empty string."""

    async def read() -> str:
        return str((await answer)["problem"])

    problem = await awaited_problem("", read())
    if problem:
        log.warning(f"the engine could not be recorded: {problem}")
    return problem


# Fields that autoprof reads from the body of `/start_profile`.
KEYS = frozenset({"global_step", "duration_s"})


# Function that handles a request to one of autoprof's routes. It gets the engine and the body of the request, and
# returns the HTTP status and the content of the response.
AnswerRoute = Callable[["ServedEngine", bytes], Awaitable[tuple[int, dict[str, str]]]]


async def answer_start(server: ServedEngine, body: bytes) -> tuple[int, dict[str, str]]:
    """Handle `/start_profile`. Return the HTTP status and the content of the response."""
    try:
        step, duration_s = window_of(body)
    except ValueError as error:
        seam.pass_on(error)
        return 400, {"problem": str(error)}
    return _answer(await server.open_window(step, duration_s))


async def answer_stop(server: ServedEngine, body: bytes) -> tuple[int, dict[str, str]]:
    """Handle `/stop_profile`. Return the HTTP status and the content of the response."""
    return _answer(await server.close_window())


async def answer_trainer(server: ServedEngine, body: bytes) -> tuple[int, dict[str, str]]:
    """Handle a trainer's request to `/autoprof`. Return the HTTP status and the content of the response."""
    run = runtime.current()
    directory = str(run.rundir.path) if run is not None else ""
    try:
        request = Request.read(body)
    except ValueError as error:
        seam.pass_on(error)
        return 400, {"problem": str(error)}
    if request.action == "stop":
        return await answer_stop(server, b"")
    if request.action == "start":
        status, content = _answer(await server.open_window(request=request))
        return status, content | {"run": directory}
    server.follow(same_run=request.run == directory)
    return 200, {"problem": "", "run": directory}


def window_of(body: bytes) -> tuple[int | None, float | None]:
    """Return the step and the window's duration in seconds from the body of `/start_profile`.

    If the body does not contain a value, return None for it.

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

    def reset(self) -> None:
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
        run = call.run
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

    def _open(self, run: runtime.Runtime, call: Call) -> Generator[Wait, Any, _ServerWindow | None]:
        value = call.at(self.url)
        urls = [_url(address) for address in (value if isinstance(value, (list, tuple)) else [value])]
        new_urls = [url for url in urls if url not in _state.directories]
        _state.directories.update(dict.fromkeys(new_urls, ""))
        directory = str(run.rundir.path)
        lead = Request(action="lead", run=directory)
        answers = yield from _ask_all([(url, lead) for url in new_urls], run.settings)
        _state.directories.update({url: answer.directory for url, answer in zip(new_urls, answers, strict=True)})
        _, announcement = cluster.own_announcement()
        if announcement is None or not announcement.captured or in_whole_span():
            return None
        settings = run.settings.overridden(announcement.overrides)
        starts: list[tuple[str, Request]] = []
        for index, url in enumerate(urls):
            if _selects_server(settings, index, len(urls)):
                # A server with its own run uses its own settings.
                overrides = announcement.overrides if _state.directories[url] == directory else {}
                starts.append((url, Request.of_step(announcement, index, index, overrides)))
        answers = yield from _ask_all(starts, settings)
        return _ServerWindow(settings, [(*start, answer) for start, answer in zip(starts, answers, strict=True)])


class _ServerWindow(msgspec.Struct, eq=False):
    """Window of one step: the servers that were asked to start, the start and stop requests, and the answers."""

    settings: Settings
    starts: list[tuple[str, Request, _Answer]]

    def close(self, run: runtime.Runtime) -> Generator[Wait, Any, None]:
        """Stop the engines. For each server, log where its capture is, or write a meta file with the problem."""
        # If a start was not answered in time, the engine may start later. So the engine is stopped, too.
        urls_to_stop = [url for url, _, start in self.starts if not start.refused]
        stops = yield from _ask_all([(url, Request(action="stop")) for url in urls_to_stop], self.settings)
        stop_problems = {url: stop.problem for url, stop in zip(urls_to_stop, stops, strict=True)}
        for url, request, start in self.starts:
            if problem := start.problem or stop_problems.get(url, ""):
                subject = request.subject("engine")
                Capture(run, subject, self.settings.for_role(ROLE), TorchTool()).fail(f"{url}: {problem}")
            else:
                log.info(f"step {request.step}: its rollout is in the run of {url}, {start.directory}")


def _selects_server(settings: Settings, index: int, server_count: int) -> bool:
    """Return True if the settings select the server. `AUTOPROF_RANKS` selects servers by index if there are several."""
    if server_count == 1:
        return settings.takes_role(ROLE, GENERATE)
    return settings.takes(ROLE, range(index, index + 1), GENERATE)


def _url(address: Any) -> str:
    if not isinstance(address, str):
        host = str(address.host)
        address = f"[{host}]:{address.port}" if ":" in host else f"{host}:{address.port}"
    return (address if "://" in address else f"http://{address}").rstrip("/")


def _ask_all(requests: Sequence[tuple[str, Request]], settings: Settings) -> Generator[Wait, Any, list[_Answer]]:
    """Send requests to servers, all at the same time, and return the answers in the same order.

    The hooked call waits for the answers, in a thread (`InThread`). This generator yields that wait.

    Args:
        requests: Pairs of the URL of a server and the request to send to it.
        settings: The settings of the capture, with the timeout of a request.
    """
    if not requests:
        return []
    answers: list[_Answer] = yield InThread(_ask_in_parallel, requests, settings)
    return answers


def _ask_in_parallel(requests: Sequence[tuple[str, Request]], settings: Settings) -> list[_Answer]:
    if len(requests) == 1:
        return [_ask_server(settings, *requests[0])]
    pool = ThreadPoolExecutor(min(len(requests), MAX_PARALLEL_REQUESTS), "autoprof-asking")
    try:
        return list(process.start_thread(pool.map, lambda request: _ask_server(settings, *request), requests))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _ask_server(settings: Settings, url: str, request: Request) -> _Answer:
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
