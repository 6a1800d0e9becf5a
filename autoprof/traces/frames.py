"""Names of operators: addresses of objects, frames of autoprof and of profilers, and functions that wait."""

from __future__ import annotations

import re

# Category of the events of Python functions, which a profiler records with `stack`.
FUNCTION = "python_function"
# Name of a stage's time outside of all operators: the own time of the range that autoprof puts around the stage.
REST = "rest of the stage"
# Names under which autoprof's frames are summed. OWN_WORK also stands for all events inside of such a frame.
OWN_FRAME, OWN_WORK = "frames of profilers", "autoprof's work"

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# autoprof's modules. Functions in run/, rundir/ and windows/ call no function of the program. Wrappers do, and a trace
# shows the functions that start the profiler as if they lasted to the end of the trace (torch 2.13).
_FRAME = re.compile(
    r"(?:^|/)autoprof/(?:(?P<leaf>run|rundir|windows)/.*"
    r"|(?:__init__|agent|(?:_boot|base|behaviours|capture|cli|config|hooks)/.*))\.py\(\d+\): "
)
# torch's functions that begin and end recordings and ranges, and that ask for the state of the profiler.
_PROFILER = re.compile(
    r"(?:^|/)torch/(?:profiler|autograd)/profiler\.py\(\d+\): |<built-in method _(?:record_function_|profiler_)"
)
_WAIT = re.compile(
    r"<built-in (?:function (?:sleep|sched_yield|select|wait\w*)>"
    r"|method (?:(?:acquire|__enter__) of _thread\.\w*[lL]ock|get of _queue|\w+ of select\.|recv\w* of _socket"
    r"|accept of _socket|wait of ))"
)


def tidy(category: str, name: str) -> str:
    """Return the name under which the events of an operator are summed.

    The names of Python functions contain the addresses of their objects, which differ in each process. So the addresses
    are removed. The name of a frame of autoprof or of torch's profiler is `OWN_FRAME` or `OWN_WORK`.
    """
    if category != FUNCTION:
        return name
    if (frame := _FRAME.search(name)) is not None:
        return OWN_WORK if frame["leaf"] else OWN_FRAME
    return OWN_FRAME if _PROFILER.search(name) else _ADDRESS.sub("", name)


def waits(category: str, name: str) -> bool:
    """Return True if an operator only waits: for a lock, a queue, a socket, another process or a time."""
    return category == FUNCTION and _WAIT.match(name) is not None
