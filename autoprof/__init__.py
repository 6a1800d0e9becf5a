"""Profiler for LLM reinforcement-learning runs, switched on by `AUTOPROF=1` in front of the command.

A script or notebook with its own loop calls `start`, `stop`, `step` and `stage` to mark the parts of a run. Each
function is imported at its first use, since an interpreter start imports this module. `__init__.pyi` has their types.
"""

__version__ = "0.1.0"

_HOMES = {
    "stage": "blocks",
    "step": "blocks",
    "start": "session",
    "stop": "session",
    "load_ipython_extension": "session",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f"{__name__}.behaviours.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
