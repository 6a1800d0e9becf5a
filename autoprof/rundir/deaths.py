"""Processes of a run that died, the likely cause first, and the sentences that report them.

Consequences come after their cause: workers that Ray or a launcher kills because the run has ended are listed last, and
a process that vanished with no open span ended as Ray's jobs normally do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from autoprof.base import files, identity, interrupts, units
from autoprof.base.originals import io, os, time
from autoprof.base.redact import hidden
from autoprof.rundir import memory_state, open_spans
from autoprof.rundir.layout import CRASHES, RunDir
from autoprof.rundir.open_spans import GONE, ProcessState
from autoprof.rundir.records import Death, Frame, Named, OpenSpan, Raised, RunFile
from autoprof.rundir.runs import ENDED, FAILED, UNFINISHED, Run, exit_status

EXCEPTION, EXIT, CRASH, KILLED, GONE_DEAD = "exception", "exit", "crash", "killed", "gone"
KERNEL, RAY, NODE = "kernel", "Ray", "node"
# So many are told.
_MOST = 16
# Words of exceptions that follow from the death of another process: a lost connection, and Ray's and vLLM's reports.
_FOLLOWS = re.compile(
    r"connection (was |has been )?(closed|reset|refused|lost)|\bpeer\b|broken pipe|\bEOF\b|nccl|gloo|timed? ?out"
    r"|died unexpectedly|raylet died|owner has exited|\broot cause\b",
    re.IGNORECASE,
)
# The place of a process that is gone without a word, among causes.
_GONE_PLACE = 2
_CTRL_C = "SIGINT"
_EXIT = "SystemExit"


def of_run(run: Run) -> list[Death]:
    """Return the deaths that matter for a run, those of earlier attempts last.

    A run that ended well has only crashes and kills.
    """
    path, info, state = Path(run.path), run.info, run.state.partition(" ")[0]
    # A directory without `run.json` says nothing.
    if info.error == _CTRL_C or not info.state:
        return []
    everything = find(path, info, over=state in (ENDED, FAILED))
    found = [each for each in everything if not each.earlier]
    earlier = [each for each in everything if each.earlier]
    if state == FAILED:
        return [*_with_status(found, info, exit_status(path)), *earlier]
    if state == ENDED:
        # The program may have left open spans on purpose.
        return [each for each in everything if each.how in (CRASH, KILLED)]
    if state == UNFINISHED:
        return [*_with_starter(found, info, open_spans.read(path)), *earlier]
    return [each for each in everything if each.how != EXCEPTION]


def find(path: Path, info: RunFile, over: bool, own: Raised | None = None) -> list[Death]:
    """Return the processes that died, the likely cause first.

    Args:
        path: The run's directory.
        info: Its `run.json`.
        over: Whether the process that started it has noted in `run.json` who was gone when it ended.
        own: The exception that is ending the process that started it, which is this one.
    """
    # At its end that process has no time for those that are still running.
    exception = own or info.exception
    named = [each.pid for each in exception.named] if exception is not None else []
    states = open_spans.read(path, running=over, named=named)
    noted = {(death.host, death.pid): death for death in info.died} if over else {}
    dead = dict(noted)
    for state in states:
        if (state.host, state.pid) in dead:
            continue
        if not over and state.state == GONE and _stages(state.spans):
            dead[state.host, state.pid] = _gone(state, info)
        elif (raised := _raised(state)) is not None:
            dead[state.host, state.pid] = _exited(_ended(state, info, *raised))
    for crash in read_crash_file(path):
        # A later process with the same pid did not crash.
        whose = [state for state in states if state.begun_ns <= crash.ns]
        death = dead.get((crash.host, crash.pid)) or _known(whose, info, crash.host, crash.pid)
        dead[crash.host, crash.pid] = msgspec.structs.replace(
            death, how=CRASH, signal=crash.signal, frames=crash.frames, last_ns=crash.ns, file=crash.file
        )
    if exception is not None and (info.host, info.pid) not in dead:
        now = time.time_ns() if own is not None else round((info.ended or 0) * 1e9)
        known = _known(states, info, info.host, info.pid)
        dead[info.host, info.pid] = msgspec.structs.replace(known, how=EXCEPTION, exception=exception, last_ns=now)
    said = [death.exception for death in dead.values() if death.exception is not None]
    _name(dead, states, info, [*said, *([exception] if exception is not None else [])])
    # A death of an earlier attempt is no cause of what happened in a later one.
    attempts: dict[int, list[Death]] = {}
    for death in dead.values():
        ago = _attempts_ago(death, info)
        attempts.setdefault(ago, []).append(msgspec.structs.replace(death, earlier=ago > 0))
    ordered = [death for ago in sorted(attempts) for death in _told(_in_order(attempts[ago]))]
    return ordered[:_MOST]


def _attempts_ago(death: Death, info: RunFile) -> int:
    """Return how often the run was resumed after a death."""
    if not death.last_ns or not info.earlier:
        return 0
    starts = [info.started, *(each.started or 0.0 for each in info.earlier[1:])]
    return sum(start * 1e9 > death.last_ns for start in starts)


def _in_order(dead: Sequence[Death]) -> list[Death]:
    """Return the deaths of one attempt, the likely cause first."""
    gone = any(death.how in (GONE_DEAD, CRASH, KILLED) or (death.how == EXIT and not death.started) for death in dead)
    # On one host the clock tells which exception was first; between hosts clocks differ.
    failed = {death.host for death in dead if death.how == EXCEPTION and not _follows(death)}
    return sorted(dead, key=lambda death: (_place(death, gone or bool(failed - {death.host})), death.last_ns))


def _told(deaths: Sequence[Death]) -> list[Death]:
    """Leave out an exception of other processes through which Ray or a launcher brought it."""
    kept, known = [], set()
    for death in deaths:
        exception = death.exception if death.how == EXCEPTION else None
        what = (exception.type, exception.message) if exception is not None else None
        if what is None or what not in known:
            kept.append(death)
        known.add(what)
    return kept


def _follows(death: Death) -> bool:
    """Return True if the exception of a death is of the kind that follows from the death of another process."""
    return death.exception is not None and (_names(death.exception) or bool(_FOLLOWS.search(death.exception.message)))


def _names(exception: Raised) -> bool:
    """Return True if an exception names a dead process. Older runs have names without a pid and a cause."""
    return any(named.pid or named.cause for named in exception.named)


def _place(death: Death, gone: bool) -> int:
    """Return the place of a death among the likely causes, which begin with 0.

    Args:
        death: The death.
        gone: True if a process died in a way from which exceptions of other processes follow.
    """
    if death.how == CRASH or death.killer or (death.how == KILLED and death.signal != "SIGTERM"):
        return 0
    if death.how == EXCEPTION and death.exception is not None:
        return _GONE_PLACE + 1 if _names(death.exception) or (gone and _follows(death)) else 1
    return _GONE_PLACE if death.how != EXIT or not death.started else 4


def _stages(spans: Iterable[OpenSpan]) -> list[OpenSpan]:
    return [span for span in spans if span.kind in ("step", "stage")]


def _gone(state: ProcessState, info: RunFile) -> Death:
    spans = _stages(state.spans)
    inner = next((span for span in reversed(spans) if span.kind == "stage"), spans[-1] if spans else None)
    step = next((span.step for span in reversed(spans) if span.step is not None), None)
    # Between two stages the one before tells who it was.
    before = state.ended if inner is None and not state.spans else None
    last = inner or before
    # It may be what the exception has left.
    left = before.name if before is not None and before.error else ""
    death = Death(
        how=GONE_DEAD,
        host=state.host,
        pid=state.pid,
        role=last.role if last is not None else "",
        rank=last.rank if last is not None else None,
        step=step if before is None else before.step,
        after=before.name if before is not None and not left else "",
        stage=inner.name if inner is not None and inner.kind == "stage" else left,
        since_ns=inner.start_ns if inner is not None else 0,
        last_ns=state.last_ns,
        resident_bytes=state.memory[1].resident_bytes,
        started=(info.host, info.pid) == (state.host, state.pid),
        file=f"timeline/{state.file.name}",
    )
    if state.host == identity.HOST and state.stderr and (crash := crash_in_log(state.stderr)) is not None:
        return msgspec.structs.replace(death, how=CRASH, signal=crash[0], frames=crash[1], file=state.stderr)
    return _killed_by_kernel(death, state)


def _killed_by_kernel(death: Death, state: ProcessState) -> Death:
    """Return it as killed where the kernel has killed a process of its control group since it began."""
    first, last = state.memory
    kills = last.kills
    if state.host == identity.HOST and state.boot == identity.machine():
        kills = max(kills, memory_state.kills(first.cgroup))
    if kills <= first.kills:
        return death
    used = max(last.used_bytes, last.used_peak_bytes, memory_state.peak_of(first.cgroup))
    return msgspec.structs.replace(
        death,
        how=KILLED,
        signal="SIGKILL",
        killer=KERNEL,
        used_bytes=min(used, last.limit_bytes or used),
        limit_bytes=last.limit_bytes,
    )


def _raised(state: ProcessState) -> tuple[Raised, int] | None:
    """Return the exception that has ended a process, or the trainer in it, and when it left the first stage."""
    line = state.raised
    if state.exception is not None:
        same = line is not None and line.exception.type == state.exception.type
        return state.exception, line.unix_ns if same and line is not None else state.last_ns
    return None if line is None else (line.exception, line.unix_ns)


def _ended(state: ProcessState, info: RunFile, exception: Raised, when: int) -> Death:
    line = state.raised
    return Death(
        how=EXCEPTION,
        host=state.host,
        pid=state.pid,
        role=line.role if line is not None else "",
        rank=line.rank if line is not None else None,
        step=line.step if line is not None else None,
        stage=state.within or (line.name if line is not None and line.span == "stage" else ""),
        last_ns=when,
        started=(info.host, info.pid) == (state.host, state.pid),
        exception=exception,
        file=f"timeline/{state.file.name}",
    )


def _exited(death: Death) -> Death:
    """Return it as an exit where its exception is that of `sys.exit`, whose text is the status."""
    exception = death.exception
    if death.started or exception is None or exception.type != _EXIT:
        return death
    said = exception.message
    status = int(said) if said.isdecimal() and len(said) < 4 else 0 if said in ("", "None") else 1
    return msgspec.structs.replace(death, how=EXIT, status=status)


def _known(states: Iterable[ProcessState], info: RunFile, host: str, pid: int) -> Death:
    for state in states:
        if (state.host, state.pid) == (host, pid):
            return _gone(state, info)
    return Death(how=GONE_DEAD, host=host, pid=pid, started=(info.host, info.pid) == (host, pid))


def _name(
    dead: dict[tuple[str, int], Death], states: Sequence[ProcessState], info: RunFile, said: Iterable[Raised]
) -> None:
    """Add what exceptions say of dead processes."""
    for named in [named for exception in said for named in exception.named]:
        if not named.pid:
            continue
        hosts = [state.host for state in states if state.pid == named.pid and state.state != open_spans.RUNNING]
        host = next(iter(hosts), info.host if not states else "")
        death = dead.get((host, named.pid)) or _known(states, info, host, named.pid)
        if death.how in (GONE_DEAD, KILLED):
            dead[host, named.pid] = _as_named(death, named)


def _as_named(death: Death, named: Named) -> Death:
    if death.killer:
        return death
    if named.cause:
        killer = RAY if named.cause == "memory" else NODE
        used, limit = named.used_bytes, named.limit_bytes
        return msgspec.structs.replace(death, how=KILLED, killer=killer, used_bytes=used, limit_bytes=limit)
    rank = death.rank if death.rank is not None else named.rank
    if named.signal:
        return msgspec.structs.replace(death, how=KILLED, signal=named.signal, rank=rank)
    if named.status:
        return msgspec.structs.replace(death, how=EXIT, status=named.status, rank=rank)
    return death


def _with_status(found: list[Death], info: RunFile, status: int | None) -> list[Death]:
    """Return them with the exit status, which `sys.exit` has given, inside of a stage or anywhere."""
    exits = [each for each in found if each.started and each.exception is not None and each.exception.type == _EXIT]
    if not status or (found and not exits):
        return found
    own = exits[0] if exits else Death(how=EXIT, host=info.host, pid=info.pid, started=True)
    return [*(each for each in found if each not in exits), msgspec.structs.replace(own, how=EXIT, status=status)]


def _with_starter(found: list[Death], info: RunFile, states: Sequence[ProcessState]) -> list[Death]:
    """Return them with the process that started the run, which is gone: all others end with it but who died before."""
    own = next((death for death in found if death.started), None)
    if own is None and any(
        state.pid == info.pid and state.host == info.host and state.state != GONE for state in states
    ):
        return found
    if own is None:
        # A driver of Ray's has no spans: the trainer's process tells where the run was.
        trainer = max((death for death in found if death.step is not None), key=lambda each: each.last_ns, default=None)
        own = Death(how=GONE_DEAD, host=info.host, pid=info.pid, started=True)
        if trainer is not None:
            own = msgspec.structs.replace(own, step=trainer.step, stage=trainer.stage, last_ns=trainer.last_ns)
    others = [death for death in found if not death.started]
    before = [death for death in others if _place(death, gone=True) < _GONE_PLACE]
    if own.how != GONE_DEAD:
        return found
    return [*before, own, *(death for death in others if death not in before)]


# The words for the signals (`faulthandler_handlers` in CPython's Modules/faulthandler.c).
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
}
_FATAL = re.compile(r"^Fatal Python error: ([^\n]{1,100})$", re.MULTILINE)
# The library tvm-ffi, which vLLM's xgrammar brings, puts its own handler in place of Python's as it is loaded. It tells
# functions in C alone (tvm-ffi 0.1.15, src/ffi/backtrace.cc).
_TVM = "\n!!!!!!! Segfault encountered !!!!!!!\n"
_FRAME = re.compile(r'^  File "([^"\n]{1,400})", line (\d{1,9}) in ([^\n]{1,200})$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread 0x|Thread 0x|Stack \()[^\n]*$", re.MULTILINE)
# autoprof's modules that run in a program, on any host.
_OWN = re.compile(r"[/\\]autoprof[/\\]((_boot|base|behaviours|capture|hooks|run|windows)[/\\].*|__init__|agent)\.py$")
_MOST_BYTES = 1 << 20
_TAIL_BYTES = 1 << 17


class Crash(Struct, frozen=True, kw_only=True):
    """One process that crashed."""

    host: str
    pid: int
    signal: str
    frames: list[Frame]
    ns: int
    file: str


def read_crash_file(run: Path) -> list[Crash]:
    """Return the crashes of a run. Files that are empty or can't be read are left out."""
    found = []
    for path in sorted(RunDir(run).path.glob(f"{CRASHES}/*.txt")):
        try:
            ns = path.lstat().st_mtime_ns
            text = files.read(path, _MOST_BYTES).decode(errors="replace")
        except OSError as error:
            interrupts.pass_on(error)
            continue
        host, _, pid = path.stem.rpartition("-")
        if text.strip() and pid.isdecimal():
            signal, frames = parsed(text)
            found.append(
                Crash(host=host, pid=int(pid), signal=signal, frames=frames, ns=ns, file=f"{CRASHES}/{path.name}")
            )
    return found


def crash_in_log(path: str) -> tuple[str, list[Frame]] | None:
    """Return the signal and the stack at the end of a process's stderr, where it is a file.

    Ray enables `faulthandler` in its workers itself: their stacks are in their logs.
    """
    try:
        with io.open(files.opened(path), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        interrupts.pass_on(error)
        return None
    begins = [found.start() for found in _FATAL.finditer(text)]
    if begins:
        return parsed(text[begins[-1] :])
    return ("SIGSEGV", []) if _TVM in text else None


def parsed(text: str) -> tuple[str, list[Frame]]:
    """Return the signal, and the stack of the thread that crashed, or of the main thread where that runs no Python."""
    fatal = _FATAL.search(text)
    said = fatal[1].strip() if fatal else ""
    stacks = [_frames(part) for part in _THREAD.split(text)[1:]]
    # The thread that crashed comes first or is missing, the main thread is the oldest and comes last.
    current = next(
        (stack for stack, mark in zip(stacks, _THREAD.findall(text), strict=True) if not mark.startswith("Thread")),
        None,
    )
    return _SIGNALS.get(said, hidden(said)), current or (stacks[-1] if stacks else [])


def _frames(text: str) -> list[Frame]:
    """Return a stack without autoprof's functions, if it has others. The innermost function is the last."""
    found = [Frame(function, file, int(line)) for file, line, function in _FRAME.findall(text)]
    of_program = [frame for frame in found if not _OWN.search(frame.file)]
    return (of_program or found)[::-1]


# Code of libraries, which the user's own has called.
_LIBRARY = re.compile(r"[/\\](site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]|^<|^$")
_MOST_MESSAGE, _MOST_OTHERS, _MOST_FRAMES = 200, 5, 8


def sentence(death: Death, hosts: int = 1) -> str:
    """Return what happened to a process in one sentence.

    Args:
        death: The process.
        hosts: On how many hosts the run was.
    """
    return f"{'in an earlier attempt, ' if death.earlier else ''}{_who(death, hosts)} {_what(death)}"


def evidence(deaths: Sequence[Death], hosts: int = 1) -> list[str]:
    """Return the details of the first of several deaths, and the others."""
    first, *others = deaths
    lines = []
    if first.file:
        lines.append(f"process {first.pid} on {first.host}: {first.file}")
    if first.last_ns:
        seen = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first.last_ns / 1e9))
        began = f", where it had been for {units.seconds((first.last_ns - first.since_ns) / 1e9)}" if _in(first) else ""
        lines.append(f"last sign of life: {seen}{began}")
    if first.resident_bytes:
        lines.append(f"its memory when it was last looked at: {units.size(first.resident_bytes)}")
    frames = first.exception.frames if first.exception is not None and first.how != CRASH else first.frames
    lines += [f"at {frame_words(each, whole=True)}" for each in reversed(frames[-_MOST_FRAMES:])]
    if first.exception is not None and first.exception.cause:
        lines.append(f"because of {first.exception.cause}")
    lines += [f"{'' if other.earlier else 'then: '}{sentence(other, hosts)}" for other in others[:_MOST_OTHERS]]
    rest = len(others) - _MOST_OTHERS
    return [*lines, *([f"and {rest} more"] if rest > 0 else [])]


def exception_words(raised: Raised) -> str:
    """Return an exception in words: `ValueError: no score in reward.py:44 fetch_score`."""
    shown = _shown(raised.frames)
    at = f" in {frame_words(shown)}" if shown else ""
    first = raised.message.partition("\n")[0]
    said = first if len(first) <= _MOST_MESSAGE else f"{first[:_MOST_MESSAGE]}..."
    return f"{raised.type}{f': {said}' if said else ''}{at}"


def frame_words(of: Frame, whole: bool = False) -> str:
    """Return a function of a stack in words: `reward.py:44 fetch_score`, or with the whole path of its file."""
    return f"{of.file if whole else os.path.basename(of.file)}:{of.line} {of.function}"


def _in(death: Death) -> bool:
    return 0 < death.since_ns < death.last_ns - 1_000_000_000


def _who(death: Death, hosts: int) -> str:
    on = f" on {death.host}" if hosts > 1 and death.host else ""
    if death.role and death.rank is not None and death.role != "trainer":
        return f"{death.role} rank {death.rank}{on}"
    if death.role == "trainer":
        return f"the trainer, rank {death.rank},{on}" if death.rank else f"the trainer{on}"
    if death.rank is not None:
        return f"rank {death.rank}{on}"
    if death.started:
        return f"the process that started the run{on}"
    return f"process {death.pid}{on}"


def _what(death: Death) -> str:
    where = _where(death)
    place = f" {where}" if where else ""
    if death.how == CRASH:
        shown = _shown(death.frames)
        return f"{_how(death)}{place}{f': {frame_words(shown)}' if shown else ''}"
    if death.how == EXCEPTION and death.exception is not None:
        return f"ended by {exception_words(death.exception)}{f',{place}' if place else ''}"
    if death.how == EXIT and death.exception is not None and (shown := _shown(death.exception.frames)):
        return f"{_how(death)} in {frame_words(shown)}{f',{place}' if place else ''}"
    if not death.killer and not death.signal and death.how != EXIT:
        # What `os.exec` starts may not know autoprof. It is no way to leave a step.
        or_exec = " or os.exec" if death.started and not place else ""
        return f"is gone{place} without a word: it was killed by a signal, or left by os._exit{or_exec}"
    return f"{_how(death)}{place}"


def _how(death: Death) -> str:
    if death.how == CRASH:
        return f"crashed ({death.signal})" if death.signal else "crashed"
    if death.how == EXCEPTION and death.exception is not None:
        return f"ended by {death.exception.type}"
    if death.how == EXIT:
        return f"exited with status {death.status}"
    if death.killer in (KERNEL, RAY):
        by = "the kernel" if death.killer == KERNEL else "Ray"
        of = f" ({units.size(death.used_bytes)} of {units.size(death.limit_bytes)})" if death.limit_bytes else ""
        return f"was killed by {by} for memory{of}"
    if death.killer == NODE:
        return "was lost with its node"
    if death.how == KILLED:
        return f"was killed by {death.signal}"
    return "is gone"


def _where(death: Death) -> str:
    if death.after:
        return f"after {death.after} of step {death.step}" if death.step is not None else f"after {death.after}"
    if death.step is None:
        return f"in {death.stage}" if death.stage else ""
    return f"in {death.stage} of step {death.step}" if death.stage else f"in step {death.step}"


def _shown(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost function of the user's own code; of a library's where there is no other."""
    own = [frame for frame in frames if not _LIBRARY.search(frame.file)]
    return own[-1] if own else frames[-1] if frames else None
