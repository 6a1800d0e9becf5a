"""Behaviours for Ray: sessions, actor classes, and actors under `nsys`.

The workers of a session get the settings and the run id, and classes get hooks before Ray copies the classes. At the
end of a run, the process that started the run collects the files of all nodes while Ray is still up.

Actors that request GPUs start under `nsys`. For this, autoprof sets Ray's own `runtime_env={"nsight": ...}`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from autoprof import _boot
from autoprof._boot import launch
from autoprof.base import files, log, process, redact, seam, units
from autoprof.base.originals import json, os, time
from autoprof.capture.profilers import foreign, nsys
from autoprof.config.selection import Ranks
from autoprof.config.settings import Settings
from autoprof.hooks import patching
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, Parameter
from autoprof.run import clocks, cluster, end, gather, runtime
from autoprof.rundir.records import RunNode


def collect_problem(run: runtime.Runtime) -> str:
    """Return the reason why the run can't be copied to `AUTOPROF_COLLECT` at its end, or an empty string.

    The check is made at the start of the run.
    """
    url = run.settings.collect
    if not redact.is_url(url):
        return ""
    from autoprof.run.upload import lacks

    problem = lacks(url)
    return f"AUTOPROF_COLLECT: the run can't be copied to {redact.url(url)}: {problem}" if problem else ""


def store_nodes_and_collect(run: runtime.Runtime) -> None:
    """Store the nodes of the run for `run.json`. If `AUTOPROF_COLLECT` is set, collect the run's files from the nodes.

    Do nothing if Ray is not up, or if another process has started the run.

    Raises:
        OSError: The files can't be written on this node.
    """
    if not run.started_here or not cluster.is_up():
        return
    ray = sys.modules["ray"]
    run_nodes = cluster.nodes_of_run(run.info.id)
    node_ids = {node["NodeID"] for node in ray.nodes() if node["Alive"]} | {node.id for node in run_nodes}
    if len(node_ids) > 1:
        run.nodes = [RunNode(id=node.id, host=node.host, directory=node.directory) for node in run_nodes]
        if run.settings.collect:
            _collect(run, ray)
    if run.settings.on_finish and run.rundir.steps():
        end.first_to_finish(run)


def _collect(run: runtime.Runtime, ray: object) -> None:
    deadline = time.monotonic() + run.settings.stop_timeout_s
    try:
        result = gather.collect(ray, run.rundir.path, deadline=deadline, wait=True, progress=_no_progress)
    except gather.Busy as error:
        log.warning(f"the run is not collected: {error}")
        return
    gather.warn_missing(
        result.missing, f"autoprof collect {run.info.id} fetches the remaining files while the cluster is up"
    )
    log.info(f"collected {units.size(result.fetched)} from {units.count(len(result.nodes), 'node')}")


def _no_progress(total: int) -> AbstractContextManager[Callable[[int], object]]:
    return contextlib.nullcontext(lambda done: None)


# Environment variable that contains the configuration of a submitted job. ray.init raises an exception if this
# configuration and runtime_env set the same environment variable (Ray 2.60, ray/runtime_env/runtime_env.py,
# _merge_runtime_env).
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_COLLECT = "AUTOPROF_COLLECT"


class _RayState(process.State):
    """Exit handler that runs before Ray shuts down: the workers finish their files, and the run is collected."""

    ends = process.WORKERS

    def at_exit(self) -> None:
        _let_workers_write()


_state = _RayState()


class Init(Behaviour):
    """`ray.init`. autoprof adds its variables to `runtime_env`, because workers don't inherit the driver's environment.

    Workers inherit the environment of the raylet.
    """

    def around(self, call: Call) -> Around:
        patching.patch_main()
        run = call.run
        if "nsys" in run.settings.tool:
            nsys.put_on_path(run.settings.nsys)
        call.kwargs["runtime_env"] = merged(chosen_runtime_env(call.kwargs, os.environ), os.environ)
        job = os.environ.get(_JOB_CONFIG)
        if job is not None:
            os.environ[_JOB_CONFIG] = job_with_site(job, os.environ)
        try:
            yield CALL
        finally:
            if job is not None:
                os.environ[_JOB_CONFIG] = job
        # The driver counts the steps of all Ray workers, even if `srun` has started Ray on each node.
        os.environ.pop(launch.LAUNCH_RANK, None)
        # Ray's exit handler, which kills the workers, was registered at Ray's import. autoprof's exit handler must run
        # before Ray's.
        _state.register_at_exit()
        # `autoprof.windows.stats` is loaded only if a setting compares steps.
        if (stats := sys.modules.get("autoprof.windows.stats")) is not None:
            stats.resume()
        run.register()
        run.hooks.write()  # `autoprof collect` reads the cluster's address in the hook log
        if run.started_here and (problem := collect_problem(run)):
            log.warning_once(problem)

    def install(self, owner: Any) -> bool:
        if cluster.is_up():
            from ray._private.worker import SCRIPT_MODE, global_worker

            if global_worker.mode == SCRIPT_MODE:
                log.warning_once(
                    "Ray was initialised before autoprof was loaded, so its workers run without autoprof; "
                    "set AUTOPROF=1 in the environment of the command that starts the run, "
                    "or call autoprof.start() before ray.init()"
                )
        return False


class Shutdown(Behaviour):
    """`ray.shutdown`, which kills the workers. Before the call, autoprof waits until the traces are written."""

    def around(self, call: Call) -> Around:
        _let_workers_write()
        yield CALL


class ActorClass(Behaviour):
    """The call makes an actor class of a class. Before the call, autoprof applies the hooks to the class's methods.

    Attributes:
        argument: Parameter whose argument is the class.
    """

    argument: Parameter = "function_or_class"

    def around(self, call: Call) -> Around:
        cls = call.argument(self.argument)
        if isinstance(cls, type):
            patching.patch_class(cls)
        yield CALL


def chosen_runtime_env(kwargs: Mapping[str, Any], environ: Mapping[str, str]) -> Any:
    """Return the `runtime_env` that `ray.init` would use for these keyword arguments, or None.

    If the argument `runtime_env` is missing and the program is not a submitted job, Ray uses the `runtime_env` of the
    `JobConfig` (Ray 2.60, ray/_private/worker.py).

    Args:
        kwargs: Keyword arguments of `ray.init`.
        environ: Environment of the driver.
    """
    runtime_env = kwargs.get("runtime_env")
    if runtime_env or _JOB_CONFIG in environ:
        return runtime_env
    return getattr(kwargs.get("job_config"), "runtime_env", None)


def job_with_site(job: str, environ: Mapping[str, str]) -> str:
    """Return the job configuration after adding autoprof's folders to the job's PYTHONPATH, in JSON.

    If a submitted job sets PYTHONPATH, `ray.init` must not set PYTHONPATH again. So the job's own value must contain
    the folders. If the job does not set PYTHONPATH, return the configuration unchanged.

    Args:
        job: Configuration of the job, in JSON.
        environ: Environment of the driver.
    """
    content = json.loads(job)
    variables = (content.get("runtime_env") or {}).get("env_vars") or {}
    site = _site_folders(environ)
    if not site or "PYTHONPATH" not in variables:
        return job
    variables["PYTHONPATH"] = _python_path(variables["PYTHONPATH"], site)
    return json.dumps(content)


def merged(runtime_env: Any, environ: Mapping[str, str]) -> Any:
    """Return a copy of `runtime_env` to which autoprof's variables are added. Variables of the user have priority.

    Args:
        runtime_env: Argument of `ray.init`: None, a dict, or a `RuntimeEnv`, which is a subclass of dict.
        environ: Environment of the driver.
    """
    user_variables = runtime_env.get("env_vars") or {} if runtime_env else {}
    job_config = json.loads(environ.get(_JOB_CONFIG) or "{}")
    job_variables = (job_config.get("runtime_env") or {}).get("env_vars") or {}
    own_variables = {name: value for name, value in environ.items() if name.startswith(_boot.ENABLE)}
    variables = {name: value for name, value in own_variables.items() if name not in job_variables}
    # Ray logs the variables of workers, and the value of AUTOPROF_COLLECT may be a URL with a password.
    variables.pop(_COLLECT, None)
    # A worker is not a rank of the driver's launcher.
    variables.pop(launch.LAUNCH_RANK, None)
    variables.pop(launch.LAUNCH, None)
    if foreign.INJECTION in user_variables or foreign.INJECTION in job_variables:
        # Keep the user's value: the workers check the value themselves (`foreign.free_cupti`).
        variables |= {foreign.KEEP: "1"} if foreign.KEEP not in job_variables else {}
    elif environ.get(foreign.INJECTION) == foreign.NOTHING:
        variables[foreign.INJECTION] = foreign.NOTHING
    if "PYTHONPATH" not in job_variables and (site := _site_folders(environ)):
        # Ray replaces ${PYTHONPATH} by the worker's PYTHONPATH (Ray 2.60, ray/_private/runtime_env/context.py).
        path = (
            _python_path(user_variables["PYTHONPATH"], site)
            if "PYTHONPATH" in user_variables
            else _with_site_first("${PYTHONPATH}", site)
        )
        user_variables = {**user_variables, "PYTHONPATH": path}
    result = type(runtime_env)(**runtime_env) if runtime_env else {}
    result["env_vars"] = {**variables, **user_variables}
    return result


def _let_workers_write() -> None:
    run = runtime.current()
    if run is None:
        return
    with seam.guard("ray/shutdown", runtime.report):
        clocks.stop()
        if (stats := sys.modules.get("autoprof.windows.stats")) is not None:
            stats.stop()
        end.let_workers_write(run)
        store_nodes_and_collect(run)


def _python_path(user_path: str, site: list[str]) -> str:
    """Return a PYTHONPATH that contains the user's folders and autoprof's folders (`site`).

    The user's folders come first, unless they contain a sitecustomize, which would hide autoprof's sitecustomize. In
    that case, autoprof's folders come first, and autoprof's sitecustomize runs the user's sitecustomize.
    """
    has_sitecustomize = any(
        files.is_file(os.path.join(folder, name))
        for folder in filter(None, user_path.split(os.pathsep))
        for name in ("sitecustomize.py", "sitecustomize/__init__.py")
    )
    return _with_site_first(user_path, site) if has_sitecustomize else os.pathsep.join(filter(None, [user_path, *site]))


def _with_site_first(user_path: str, site: list[str]) -> str:
    return os.pathsep.join(filter(None, [*site, user_path]))


def _site_folders(environ: Mapping[str, str]) -> list[str]:
    """Return the folders that `autoprof run` put in front of PYTHONPATH. Workers import autoprof from these folders."""
    return [folder for folder in environ.get("AUTOPROF_SITE", "").split(os.pathsep) if folder]


# Keys of the nsight options in a RuntimeEnv (`_nsight`) and in a user's dict (`nsight`) (Ray 2.60,
# ray/runtime_env/runtime_env.py).
_NSIGHT = ("_nsight", "nsight")
# Keys of runtime_env that choose the command of the interpreter. Ray's nsight plug-in would override the command
# (runtime_env/nsight.py, modify_context).
_INTERPRETERS = ("conda", "container", "image_uri", "pip", "py_executable", "uv", "_rocprof_sys", "rocprof_sys")


class Actor(Behaviour):
    """The call creates an actor. If `AUTOPROF_TOOL` contains `nsys`, an actor that requests GPUs starts under nsys."""

    def around(self, call: Call) -> Around:
        settings = call.run.settings
        if "nsys" in settings.tool and call.kwargs.get("num_gpus"):
            from ray.runtime_env import RuntimeEnv

            runtime_env = call.kwargs.get("runtime_env") or {}
            if runs_under_nsys(runtime_env, _inherited_runtime_env(), settings):
                call.kwargs["runtime_env"] = RuntimeEnv(**under_nsys(runtime_env, settings))
        yield CALL


def runs_under_nsys(runtime_env: Mapping[str, Any], inherited: Mapping[str, Any], settings: Settings) -> bool:
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


def _inherited_runtime_env() -> Mapping[str, Any]:
    """Return the `runtime_env` of this job or actor. A new actor inherits each key that its own `runtime_env` lacks."""
    if not cluster.is_up():
        return {}
    import ray

    env: Mapping[str, Any] = ray.get_runtime_context().runtime_env or {}
    return env
