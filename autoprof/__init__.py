"""autoprof profiles LLM reinforcement-learning runs from outside: `AUTOPROF=1` in front of the command.

A script or a notebook with a loop of its own says by `start`, `stop`, `step` and `stage` what belongs to a run. Each is
imported when it is first used, since an interpreter start imports this module; `__init__.pyi` has their types.
"""

__version__ = "0.1.0"

_HOMES = {
    "stage": "blocks",
    "step": "blocks",
    "start": "session",
    "stop": "session",
    "load_ipython_extension": "notebook",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f"{__name__}.behaviours.script.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
