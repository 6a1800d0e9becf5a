"""Start of Ray actors under `nsys` if they request GPUs. autoprof sets Ray's own `runtime_env={"nsight": ...}`."""

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

# Keys of the nsight options in a RuntimeEnv (`_nsight`) and in a user's dict (`nsight`) (Ray 2.60,
# ray/runtime_env/runtime_env.py).
_NSIGHT = ("_nsight", "nsight")
# Keys of runtime_env that choose the command of the interpreter. Ray's nsight plug-in would override the command
# (runtime_env/nsight.py, modify_context).
_INTERPRETERS = ("conda", "container", "image_uri", "pip", "py_executable", "uv", "_rocprof_sys", "rocprof_sys")


class Actor(Behaviour):
    """The call creates an actor. If `AUTOPROF_TOOL` contains `nsys`, an actor that requests GPUs starts under nsys."""

    def around(self, call: Call) -> Around:
        run = runtime.current()
        if run is not None and "nsys" in run.settings.tool and call.kwargs.get("num_gpus"):
            from ray.runtime_env import RuntimeEnv

            runtime_env = call.kwargs.get("runtime_env") or {}
            if wanted(runtime_env, _inherited(), run.settings):
                call.kwargs["runtime_env"] = RuntimeEnv(**under_nsys(runtime_env, run.settings))
        yield CALL
        return None


def wanted(runtime_env: Mapping[str, Any], inherited: Mapping[str, Any], settings: Settings) -> bool:
    """Return whether an actor should run under nsys.

    verl sets the variable RANK in the environment of a worker. If the settings never select this rank, the worker does
    not run under nsys.

    Args:
        runtime_env: `runtime_env` of the actor itself.
        inherited: `runtime_env` of the job or of the parent actor.
        settings: Settings of the run.
    """
    if any(env.get(name) for name in _NSIGHT for env in (runtime_env, inherited)):
        return False
    rank = str((runtime_env.get("env_vars") or {}).get("RANK", ""))
    selections = [Ranks.parse(settings.for_role(role).ranks) for role in ("", *settings.role)]
    # With `slowest`, any rank may be selected later.
    if rank.isdigit() and not any(ranks.slowest or int(rank) in ranks for ranks in selections):
        return False
    if problem := _obstacle(runtime_env, inherited, settings):
        log.warning_once(f"AUTOPROF_TOOL=nsys: {problem}; actors are not started under nsys")
        return False
    if not nsys.writes_at_once(nsys.find_nsys(settings.nsys)):
        log.warning_once(nsys.AT_THE_END)
    return True


def under_nsys(runtime_env: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return a copy of `runtime_env` for an actor under nsys that runs the interpreter of this process.

    All actors get the same nsys options, because Ray's plug-in stores one command for all actors (Ray 2.60,
    runtime_env/nsight.py, `self.nsight_cmd`). The command always ends in the word `python` (ray#66093). So the folder
    of this process's interpreter must be the first folder in PATH. Ray replaces ${PATH} by the worker's PATH.
    """
    variables = runtime_env.get("env_vars") or {}
    folders = [os.path.dirname(sys.executable), *nsys.nsys_folder(settings.nsys)]
    path = os.pathsep.join([*folders, variables.get("PATH", "${PATH}")])
    return {
        **runtime_env,
        "nsight": {**nsys.profile_options(settings.nsys), "o": nsys.OUTPUT},
        "env_vars": {**variables, "PATH": path, nsys.REPORT: nsys.OUTPUT},
    }


def _obstacle(runtime_env: Mapping[str, Any], inherited: Mapping[str, Any], settings: Settings) -> str:
    """Return the reason why actors can't run under nsys, or an empty string.

    Without this check, Ray would start no actor if nsys can't be used.
    """
    if not nsys.find_nsys(settings.nsys):
        return f"there is no {settings.nsys.executable} on the path"
    if not os.access(os.path.join(os.path.dirname(sys.executable), "python"), os.X_OK):
        return f"Ray's nsight plug-in runs `python`, but the folder of {sys.executable} does not contain it"
    for name in _INTERPRETERS:
        if runtime_env.get(name) or inherited.get(name):
            return f"Ray's nsight plug-in would override {name.lstrip('_')} of runtime_env"
    return ""


def _inherited() -> Mapping[str, Any]:
    """Return the `runtime_env` of this job or actor. A new actor inherits each key that its own `runtime_env` lacks."""
    if not cluster.is_up():
        return {}
    import ray

    env: Mapping[str, Any] = ray.get_runtime_context().runtime_env or {}
    return env
