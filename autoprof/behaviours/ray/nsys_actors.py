"""Ray: actors that use GPUs are started under `nsys`, by Ray's own `runtime_env={"nsight": ...}`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from autoprof.base import log
from autoprof.base.originals import os
from autoprof.capture.profilers import nsys
from autoprof.config.selection import Ranks
from autoprof.config.settings import Settings
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call
from autoprof.run import cluster, runtime

# How `nsight` stands in a RuntimeEnv, and in what a user writes (Ray 2.60, ray/runtime_env/runtime_env.py).
_NSIGHT = ("_nsight", "nsight")
# What chooses an interpreter, which Ray's plug-in would put aside (runtime_env/nsight.py, modify_context).
_INTERPRETERS = ("conda", "container", "image_uri", "pip", "py_executable", "uv", "_rocprof_sys", "rocprof_sys")


class Actor(Behaviour):
    """An actor is made: with `nsys` in `AUTOPROF_TOOL`, one that asks for GPUs is started under it."""

    def around(self, call: Call) -> Around:
        run = runtime.current()
        if run is not None and "nsys" in run.settings.tool and call.kwargs.get("num_gpus"):
            from ray.runtime_env import RuntimeEnv

            given = call.kwargs.get("runtime_env") or {}
            if wanted(given, _inherited(), run.settings):
                call.kwargs["runtime_env"] = RuntimeEnv(**under_nsys(given, run.settings))
        yield CALL
        return None


def wanted(given: Mapping[str, Any], inherited: Mapping[str, Any], settings: Settings) -> bool:
    """Return whether an actor with this `runtime_env` of its own, and that of its job or parent, is to run under nsys.

    verl names the rank of a worker in its environment; one that no window is for stays without.
    """
    if any(env.get(name) for name in _NSIGHT for env in (given, inherited)):
        return False
    rank = str((given.get("env_vars") or {}).get("RANK", ""))
    taken = [Ranks.parse(settings.for_role(role).ranks) for role in ("", *settings.role)]
    # Any may turn out to be the slowest.
    if rank.isdigit() and not any(each.slowest or int(rank) in each for each in taken):
        return False
    if why := _unable(given, inherited, settings):
        log.warning_once(f"AUTOPROF_TOOL=nsys: {why}; actors are not started under nsys")
        return False
    if not nsys.writes_at_once(nsys.find_nsys(settings.nsys)):
        log.warning_once(nsys.AT_THE_END)
    return True


def under_nsys(given: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return `given` with the entries that have Ray start the process under nsys, with the interpreter of this one.

    All actors have the same options: Ray's plug-in keeps one command for all that it is setting up (Ray 2.60,
    runtime_env/nsight.py, `self.nsight_cmd`). The command ends in the word `python` whatever interpreter Ray runs in
    (ray#66093), so that of this process goes first on the path; Ray replaces ${PATH} by the worker's own.
    """
    variables = given.get("env_vars") or {}
    folders = [os.path.dirname(sys.executable), *nsys.nsys_folder(settings.nsys)]
    path = os.pathsep.join([*folders, variables.get("PATH", "${PATH}")])
    return {
        **given,
        "nsight": {**nsys.profile_options(settings.nsys), "o": nsys.OUTPUT},
        "env_vars": {**variables, "PATH": path, nsys.REPORT: nsys.OUTPUT},
    }


def _unable(given: Mapping[str, Any], inherited: Mapping[str, Any], settings: Settings) -> str:
    """Return the obstacle, or an empty text. With an nsys that can't be run Ray would start no actor."""
    if not nsys.find_nsys(settings.nsys):
        return f"there is no {settings.nsys.executable} on the path"
    if not os.access(os.path.join(os.path.dirname(sys.executable), "python"), os.X_OK):
        return f"Ray's nsight plug-in runs `python`, and there is none beside {sys.executable}"
    for name in _INTERPRETERS:
        if given.get(name) or inherited.get(name):
            return f"Ray's nsight plug-in would override {name.lstrip('_')} of runtime_env"
    return ""


def _inherited() -> Mapping[str, Any]:
    """Return the `runtime_env` of this job or actor, which an actor made here has too where it says nothing else."""
    if not cluster.is_up():
        return {}
    import ray

    env: Mapping[str, Any] = ray.get_runtime_context().runtime_env or {}
    return env
