"""Program that is interrupted in autoprof's code repeatedly, catches the exception and continues, as notebooks do.

`python -m tests.support.interrupted lines|moments ...` prints one line for each error, then a line with figures.
"""

from __future__ import annotations

import argparse
import dis
import faulthandler
import gc
import linecache
import os
import random
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any


class Alarm(Exception):
    """Exception that only the program knows."""


# Exceptions that a signal handler raises. Two are subclasses of OSError, which many `except` clauses catch.
ALARMS = {kind.__name__: kind for kind in (Alarm, TimeoutError, ConnectionError)}
raises: type[BaseException] = KeyboardInterrupt


def handler(number: int, frame: FrameType | None) -> None:
    raise raises


def state(number: int) -> dict[str, Any]:
    """Return what autoprof has open or switched on in this process, by name."""
    from autoprof.base import process
    from autoprof.behaviours import spans, stages, steps
    from autoprof.capture import recorder, writer
    from autoprof.capture.profilers import foreign
    from autoprof.hooks import registry
    from autoprof.run import cluster, runtime

    run = runtime.current()
    assert run is not None
    torch = sys.modules.get("torch")
    return {
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "recording": recorder.current() and vars(recorder.current()),
        "claim": recorder._state.lock.locked(),
        "step": steps.state.current and steps.state.current.number,
        "announced": cluster.own_announcement()[1],
        "stages": dict(stages.running),
        "wholes": list(stages.wholes),
        "gates": {key: list(gate) for key, gate in registry._gates.items()},
        "gates' lock": registry._state.lock.locked(),
        "failures": dict(registry.failures),
        "counting": {group: count for group, count in registry._state.counting.items() if count},
        "inside": spans._sample_context.get()[:],
        "spans": len(run.timeline.running),
        "writing lines": _stays_held(run.timeline._writing),
        "torch records": bool(torch is not None and torch.autograd._profiler_enabled()),
        "foreign": (foreign._own.called, len(foreign._state.threads), len(foreign._state.npu)),
        "ending": len(process._ending),
        "writing": len(writer._state.writing),
        "parts": [part.name for last in (number - 1, number) for part in run.rundir.step(last).glob("*.part")],
    }


def _stays_held(lock: Any) -> bool:
    """Return True if the lock is held and nothing releases it. The watcher holds locks only for a moment."""
    if lock.acquire(timeout=10):
        lock.release()
        return False
    return True


# Source lines with calls of C functions that begin a `finally` block.
RESTORING = ("_signal.pthread_sigmask(_signal.SIG_SETMASK, mask)", "_thread.stack_size(size)")
# CPython checks for signals after these instructions. The empty text means the start of a function.
LOOKS = ("", "CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD", "RESUME")
if sys.version_info < (3, 11):
    LOOKS = ("", "CALL_FUNCTION", "CALL_FUNCTION_EX", "CALL_FUNCTION_KW", "CALL_METHOD", "JUMP_ABSOLUTE")
# From 3.12 on, `with` and `try` miss an exception that a trace function raises where a comprehension jumps back.
# They do catch the exception of a signal handler there.
_NOT_CAUGHT = ("FOR_ITER", "JUMP_BACKWARD") if sys.version_info >= (3, 12) else ()


class Interrupter:
    """Trace function that raises at the n-th line of autoprof's code in this thread.

    With `libraries`, it counts the lines of the libraries that autoprof calls too.
    """

    def __init__(self, opcodes: bool, libraries: bool) -> None:
        self.opcodes, self.libraries = opcodes, libraries
        self.seen: set[tuple[str, int, int]] = set()
        self.where = ""
        self.passed = 0
        self._last: dict[int, str] = {}

    def once(self, at: int) -> None:
        """Interrupt once, at line number `at`."""
        self.left, self.where, self.passed = at, "", 0
        self._last.clear()
        sys.settrace(self._called)

    def off(self) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if name.endswith("seam.py") or not (name.startswith(PACKAGE) or (self.libraries and _caller(frame))):
            return None
        if self.opcodes:
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event not in ("line", "opcode"):
            return self._line
        # Python does not check for signals at the end of a `with` block, at a `try`, or before the call in a `finally`.
        now = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0).strip()
        if now in _NOT_CAUGHT:
            return self._line
        ends_with = now == "LOAD_CONST" and text.startswith("with ")
        if event == "line" and (now == "NOP" or ends_with or text in RESTORING):
            return self._line
        if event == "opcode":
            before, self._last[id(frame)] = self._last.get(id(frame), ""), now
            if before not in LOOKS:
                return self._line
        self.passed += 1
        self.left -= 1
        if self.left == 0:
            self.where = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno} {frame.f_code.co_name}"
            if (by := _caller(frame)) is not None:
                self.where += f", called at {by.f_code.co_filename.removeprefix(PACKAGE)}:{by.f_lineno}"
            if self.opcodes:
                self.where += f" +{frame.f_lasti}"
            sys.settrace(None)
            if raises is not KeyboardInterrupt:
                handler(14, frame)
            raise raises
        return self._line


def _caller(frame: FrameType) -> FrameType | None:
    """Return autoprof's frame that called this frame of a library, or None.

    Frames of weak references and imports are left out: Python ignores exceptions in callbacks of weak references, and
    imports catch every `OSError`.
    """
    name = frame.f_code.co_filename
    if name.startswith((PACKAGE, "<frozen importlib", "<string>")) or "weakref" in name:
        return None
    caller = frame.f_back
    while caller is not None and caller.f_globals is not vars(sys.modules["small"]):
        if caller.f_code.co_filename.startswith(PACKAGE):
            return caller
        caller = caller.f_back
    return None


PACKAGE = ""


def main() -> None:
    global PACKAGE, raises
    arguments = argparse.ArgumentParser()
    arguments.add_argument("how", choices=["lines", "opcodes", "moments"])
    arguments.add_argument("--trainer", default="Wrapped")
    arguments.add_argument("--first", type=int, default=1)
    arguments.add_argument("--stride", type=int, default=1)
    arguments.add_argument("--count", type=int, default=1_000_000)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--longest", type=float, default=0.03)
    arguments.add_argument(
        "--alarm", choices=ALARMS, help="exception that the signal handler raises, instead of KeyboardInterrupt"
    )
    arguments.add_argument("--libraries", action="store_true", help="interrupt in libraries that autoprof calls too")
    arguments.add_argument("--torch", action="store_true")
    arguments.add_argument("--show", action="store_true")
    arguments.add_argument("--patience", type=float, default=300.0)
    parsed = arguments.parse_args()
    faulthandler.dump_traceback_later(parsed.patience, exit=True)
    if parsed.torch:
        gc.disable()
        import torch

        gc.freeze()
        gc.enable()
        torch._lazy_modules.discard("_inductor")
    import small

    from autoprof.capture import finisher, writer

    # Finish captures in this process: a child process for each of hundreds of captures a minute would take too long.
    writer.spawn = lambda given: finisher.finish(given | {"python": ""})
    trainer = getattr(small, parsed.trainer)()
    for _ in range(4):
        trainer.train_step()
    import autoprof
    from autoprof.capture import writer

    PACKAGE = os.path.join(os.path.dirname(autoprof.__file__), "")
    raises = ALARMS.get(parsed.alarm, KeyboardInterrupt)
    signal.signal(signal.SIGALRM, handler)
    wrong: list[str] = []
    writer.wait(60)
    usual = state(trainer.number)
    began = time.monotonic()
    interrupted = 0

    def look(where: str) -> None:
        deadline = time.monotonic() + 20
        while writer._state.writing and time.monotonic() < deadline:
            time.sleep(0.002)
        now = state(trainer.number)
        if now != usual:
            differs = {key: (usual[key], now[key]) for key in now if now[key] != usual[key]}
            wrong.append(f"{where}: {differs}")
            usual.update(now)  # don't report the same difference after the next interrupt
            if parsed.show:
                print(wrong[-1], flush=True)

    if parsed.how in ("lines", "opcodes"):
        interrupter = Interrupter(parsed.how == "opcodes", parsed.libraries)
        at, whole = parsed.first, 0
        while interrupted < parsed.count:
            caught = False
            interrupter.once(at)
            try:
                trainer.train_step()
            except raises:
                caught = True
            interrupter.off()
            if not interrupter.where:  # the step has fewer lines
                if parsed.show:
                    print("lines", interrupter.passed)
                whole += 1
                if whole > 2:
                    break
            else:
                interrupted += 1
                if not caught:
                    wrong.append(f"{interrupter.where}: the exception was lost")
                if parsed.trainer == "Paired":
                    trainer.train_step()
                look(interrupter.where)
            at += parsed.stride
    else:
        choice = random.Random(parsed.seed)
        end = threading.Event()
        main_thread = threading.get_ident()
        raised = 0

        def interrupt(number: int, frame: FrameType | None) -> None:
            """Raise if autoprof or the trainer is running, but not in this program's own code."""
            nonlocal raised
            while frame is not None:
                if frame.f_code.co_filename.startswith(PACKAGE) or frame.f_globals is vars(small):
                    raised += 1
                    raise raises
                frame = frame.f_back

        signal.signal(signal.SIGALRM, interrupt)

        def send() -> None:
            while interrupted < parsed.count:
                time.sleep(choice.random() * parsed.longest)
                signal.pthread_kill(main_thread, signal.SIGALRM)
                # Wait up to 5 ms for the exception to arrive. Python drops an exception raised in a destructor.
                for _ in range(10):
                    time.sleep(0.0005)
                    if interrupted == raised:
                        break
            end.set()

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        while not end.is_set():
            try:
                while not end.is_set():
                    trainer.train_step()
            except raises:
                interrupted += 1
        sender.join()
        if parsed.trainer == "Paired":
            trainer.train_step()
        look("after all")
    took = time.monotonic() - began
    for _ in range(3):
        trainer.train_step()
    writer.wait(60)
    for line in wrong:
        print(line)
    print(f"interrupted={interrupted} wrong={len(wrong)} steps={trainer.number} took={took:.1f}", flush=True)


if __name__ == "__main__":
    main()
