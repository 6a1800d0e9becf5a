"""One capture of an SGLang engine: started into a folder of its own, stopped, its files placed.

SGLang takes the directory with each start, and its schedulers write there by themselves: at the stop, or after the last
forward pass asked for, when no call of autoprof's is running. So they get a folder of their own for each capture, which
counts as half-written, and the files move out of it at autoprof's stop.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import re
from collections.abc import Coroutine
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from autoprof import capture, log, rundir, runtime
from autoprof.behaviours.sglang_arguments import Plan, fields_of, plan, probe, request_type
from autoprof.behaviours.sglang_scheduler import FOLDER_ENDING
from autoprof.behaviours.vllm import ROLE, Request
from autoprof.capture import Placement, Subject
from autoprof.tools.torch import TorchTool

# Set on a TokenizerManager while autoprof records its engine.
OPEN = "_autoprof_open"
# Whether a call of the engine's methods is autoprof's own.
own_call: ContextVar[bool] = ContextVar("autoprof_own_call", default=False)
# [PREFIX-]ID-TP-0[-DP-0][-PP-0][-EP-0][-EXTEND|-DECODE].trace.json.gz, and pickles of the memory history.
_FILE = re.compile(r"-(?P<part>TP-(?P<tp>\d+).*?)(?P<ending>\.trace\.json\.gz|\.[A-Za-z0-9]+)$")
# SGLang up to 0.5.2 writes the stage as Python prints an IntEnum: a number from Python 3.11 on.
_OLD_STAGE = re.compile(r"^(TP-\d+)-(?:ForwardMode\.)?(1|2|EXTEND|DECODE)$")
_STAGES = {"1": "EXTEND", "2": "DECODE"}
_PIPELINE = re.compile(r"-PP-(\d+)")
_numbers = itertools.count(1)


class Session:
    """One capture of an engine, from start to stop."""

    def __init__(self, engine: Any, run: runtime.Runtime, request: Request) -> None:
        self.ending = False
        self._engine = engine
        self._run = run
        self._request = request
        self._settings = request.settings(run)
        self._started = capture.clock()
        name = f"{ROLE}.replica{request.replica}.{rundir.HOST}.pid{os.getpid()}.{next(_numbers)}{FOLDER_ENDING}"
        self._folder = run.rundir.step(request.step) / name
        self._plan = Plan({}, [], {})
        self._late = False
        self._work: asyncio.Future[dict[str, Any]] | None = None

    async def within(self, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Await `work` for the time that a stop may take, and let it go on after that.

        A call of SGLang's that is cancelled leaves its communicator waiting for ever (0.5.8, _Communicator).
        """
        self._work = asyncio.ensure_future(work)
        await asyncio.wait({self._work}, timeout=self._settings.stop_timeout_s)
        if self._work.done():
            return self._work.result()
        self._late = True
        return {"problem": f"the engine did not answer within {self._settings.stop_timeout_s:g} s"}

    async def begin(self) -> dict[str, Any]:
        """Start, unless something speaks against it."""
        try:
            self._plan = plan(self._settings.contents, self._settings.rollout_iterations, probe(self._engine))
            for word, why in self._plan.left_out.items():
                log.warning_once(f"left out of SGLang's recordings: {word}, {why}")
            # A folder that can't be written ends the server, when it exports.
            await asyncio.to_thread(_make_writable, self._folder)
            await self._call_start(self._plan.arguments | {"output_dir": str(self._folder)})
        except Exception as error:
            self._close()
            _remove(self._folder, and_step=True)
            return {"problem": _text(error)}
        if self._late and not self.ending:
            self.ending = True
            return await self.end("the engine started too late")
        return {"problem": ""}

    async def end(self, cut: str) -> dict[str, Any]:
        """Stop and place the files. SGLang refuses a stop after it has stopped by itself, which is no problem."""
        problem = ""
        try:
            await _own(self._engine.stop_profile)
        except Exception as error:
            problem = _text(error)
        self._close()
        try:
            return await asyncio.to_thread(self._place, cut, problem)
        except Exception as error:
            runtime.report("sglang/server", error)
            return {"problem": _text(error)}

    async def _call_start(self, arguments: dict[str, Any]) -> None:
        method = self._engine.start_profile
        kind = request_type() if "output_dir" not in inspect.signature(method).parameters else None
        if kind is None:
            await _own(method, **arguments)
        else:
            await _own(method, kind(**{name: arguments[name] for name in fields_of(kind) if name in arguments}))

    def _close(self) -> None:
        if getattr(self._engine, OPEN, None) is self:
            delattr(self._engine, OPEN)

    def _place(self, cut: str, problem: str) -> dict[str, Any]:
        """Give each file that the engine left its final name and a meta file.

        SGLang records all ranks of a replica; those that nobody asked for are removed.
        """
        placed = 0
        for path in sorted(self._folder.iterdir()):
            if path.name.startswith("merged-"):
                place = self._placement(rundir.ENGINES, self._request.rank)
                place.adopt(path, ".trace.json.gz", "truncated" if cut else "complete", cut)
                continue
            found = _FILE.search(path.name)
            if found is None:
                continue
            part = _OLD_STAGE.sub(lambda old: f"{old[1]}-{_STAGES.get(old[2], old[2])}", found["part"])
            place = self._placement(part, self._rank(found))
            place.adopt(path, found["ending"], "truncated" if cut else "complete", cut)
            placed += 1
        _remove(self._folder)
        if placed:
            return {"problem": ""}
        # Armed for passes that never came, or a start that reported success and did nothing.
        armed = "no forward pass of the window ran" if "num_steps" in self._plan.arguments else "it left no file"
        reason = f"the engine recorded nothing: {armed}{f' ({problem})' if problem else ''}"
        self._placement("TP-0", self._request.rank).fail(reason)
        return {"problem": reason}

    def _placement(self, part: str, rank: int) -> Placement:
        request = self._request
        subject = Subject(step=request.step, role=ROLE, stage="rollout", rank=rank, replica=request.replica, part=part)
        place = Placement(self._run, subject, self._settings, TorchTool.name)
        place.started = self._started
        place.contents = self._plan.contents
        place.left_out = list(self._plan.left_out)
        return place

    def _rank(self, found: re.Match[str]) -> int:
        pipeline = _PIPELINE.search(found["part"])
        size = getattr(self._engine.server_args, "tp_size", 1)
        return self._request.rank + int(found["tp"]) + (int(pipeline[1]) * size if pipeline else 0)


async def _own(method: Any, *arguments: Any, **keywords: Any) -> None:
    """Call the engine's own `start_profile` or `stop_profile`, which autoprof's hooks then let through."""
    token = own_call.set(True)
    try:
        await method(*arguments, **keywords)
    finally:
        own_call.reset(token)


def _make_writable(folder: Path) -> None:
    """Make a folder in which a file can be written.

    Raises:
        OSError: It can't.
    """
    folder.mkdir(parents=True)
    probe_file = folder / "writable"
    probe_file.touch()
    probe_file.unlink()


def _remove(folder: Path, and_step: bool = False) -> None:
    """Remove a folder of autoprof's, and the step's if nothing else is in it."""
    try:
        folder.rmdir()
        if and_step:
            folder.parent.rmdir()
    except OSError:  # it was never made, or holds something
        pass


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
