"""Ray's sessions: settings and run id reach the workers, and classes are patched before Ray copies them.

At the end of a run, the process that started it asks the nodes for their parts while Ray is still up.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from autoprof import _boot
from autoprof._boot import command
from autoprof.base import files, interrupts, log, process, redact, units
from autoprof.base.originals import json, os
from autoprof.capture import cupti
from autoprof.capture.profilers import nsys
from autoprof.hooks import patching
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, Parameter
from autoprof.run import clocks, cluster, end, runtime
from autoprof.run.collect import gather as results
from autoprof.run.runtime import Runtime


def hindrance(run: Runtime) -> str:
    """Return the reason that the run can't be copied, known when it begins; an empty text for none."""
    to = run.settings.collect
    if not redact.is_url(to):
        return ""
    from autoprof.run.collect.upload import lacks

    why = lacks(to)
    return f"AUTOPROF_COLLECT: the run can't be copied to {redact.url(to)}: {why}" if why else ""


def through_ray(run: Runtime) -> None:
    """Collect where that was asked for. Nothing is done in processes that have not started the run, or without Ray.

    Raises:
        OSError: It can't be written here.
    """
    if not run.started_here or not cluster.is_up():
        return
    ray = sys.modules["ray"]
    known = cluster.nodes_of_run(run.info.id)
    others = {node["NodeID"] for node in ray.nodes() if node["Alive"]} | {node.id for node in known}
    if len(others) > 1:
        run.nodes = cluster.nodes_for_run_json(known)
        if run.settings.collect:
            _collect(run, ray)
    if run.settings.on_finish and run.rundir.steps():
        end.first_to_finish(run)


def _collect(run: Runtime, ray: object) -> None:
    from autoprof.run.collect import gather
    from autoprof.run.collect.fetch import Patience

    patience = Patience(run.settings.stop_timeout_s)
    try:
        result = gather.collect(ray, run.rundir.path, patience, wait=True, progress=_quietly)
    except gather.Busy as error:
        log.warning(f"the run is not collected: {error}")
        return
    results.warn_missing(
        result.missing, f"autoprof collect {run.info.id} fetches what is still there, while the cluster is up"
    )
    log.info(f"{units.size(result.fetched)} were collected from {units.count(len(result.nodes), 'node')}")


@contextlib.contextmanager
def _quietly(total: int) -> Iterator[Callable[[int], object]]:
    yield lambda done: None


# What a job that was submitted brings along; ray.init refuses a variable that is in both (Ray 2.60,
# ray/runtime_env/runtime_env.py, _merge_runtime_env).
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_COLLECT = "AUTOPROF_COLLECT"


class _State(process.State):
    """The end of this process's connection to Ray."""

    ends = process.WORKERS

    def at_exit(self) -> None:
        _let_workers_write()


_state = _State()


class Init(Behaviour):
    """`ray.init`: workers inherit the environment of the raylet, not of the driver, so it goes into `runtime_env`."""

    def around(self, call: Call) -> Around:
        patching.patch_main()
        run = runtime.current()
        if run is not None and "nsys" in run.settings.tool:
            nsys.put_on_path(run.settings.nsys)
        call.kwargs["runtime_env"] = merged(given(call.kwargs, os.environ), os.environ)
        job = os.environ.get(_JOB_CONFIG)
        if job is not None:
            os.environ[_JOB_CONFIG] = job_with_site(job, os.environ)
        try:
            yield CALL
        finally:
            if job is not None:
                os.environ[_JOB_CONFIG] = job
        # The driver counts the steps of all of Ray's workers, also where `srun` has started Ray on each node.
        os.environ.pop(command.LAUNCH_RANK, None)
        # Ray's own end of the driver, which kills the workers, was registered when it was imported, so comes after it.
        _state.end_first()
        # Loaded where a setting compares steps.
        if (comparing := sys.modules.get("autoprof.windows.monitor")) is not None:
            comparing.resume()
        if run is not None:
            run.register()
            run.hooks.write()  # `autoprof collect` reads the cluster's address there
            if run.started_here and (said := hindrance(run)):
                log.warning_once(said)
        return None

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
    """`ray.shutdown` kills the workers: what they are writing is waited for."""

    def around(self, call: Call) -> Around:
        _let_workers_write()
        yield CALL
        return None


class ActorClass(Behaviour):
    """A class becomes an actor class: hooks for its methods are applied first.

    Attributes:
        argument: The name of the parameter that takes the class.
    """

    argument: Parameter = "function_or_class"

    def around(self, call: Call) -> Around:
        cls = call.argument(self.argument)
        if isinstance(cls, type):
            patching.patch_class(cls)
        yield CALL
        return None


def given(kwargs: Mapping[str, Any], environ: Mapping[str, str]) -> Any:
    """Return the runtime environment that `ray.init` would take from these arguments: that of a `JobConfig` where there
    is no other, and no submitted job's (Ray 2.60, ray/_private/worker.py).
    """
    runtime_env = kwargs.get("runtime_env")
    if runtime_env or _JOB_CONFIG in environ:
        return runtime_env
    return getattr(kwargs.get("job_config"), "runtime_env", None)


def job_with_site(job: str, environ: Mapping[str, str]) -> str:
    """Put autoprof's folders on the PYTHONPATH that a submitted job sets: `ray.init` may not set it again.

    Args:
        job: The job's configuration, in JSON.
        environ: The environment of the driver.
    """
    content = json.loads(job)
    variables = (content.get("runtime_env") or {}).get("env_vars") or {}
    site = _site_folders(environ)
    if not site or "PYTHONPATH" not in variables:
        return job
    variables["PYTHONPATH"] = _python_path(variables["PYTHONPATH"], site)
    return json.dumps(content)


def merged(runtime_env: Any, environ: Mapping[str, str]) -> Any:
    """Return `runtime_env` with autoprof's variables; the user's own win.

    Args:
        runtime_env: What `ray.init` was given: None, a dict or a `RuntimeEnv`, which is a dict too.
        environ: The environment of the driver.
    """
    given = runtime_env.get("env_vars") or {} if runtime_env else {}
    job = (json.loads(environ.get(_JOB_CONFIG) or "{}").get("runtime_env") or {}).get("env_vars") or {}
    ours = {name: value for name, value in environ.items() if name.startswith(_boot.ENABLE) and name not in job}
    # Ray logs what it hands to workers, and this may be a URL with a password.
    ours.pop(_COLLECT, None)
    # A worker is no rank of the driver's launcher.
    ours.pop(command.LAUNCH_RANK, None)
    ours.pop(command.LAUNCH, None)
    if cupti.INJECTION in given or cupti.INJECTION in job:
        # What the user gives the workers stays: they look for themselves (`cupti.guard`).
        ours |= {cupti.KEEP: "1"} if cupti.KEEP not in job else {}
    elif environ.get(cupti.INJECTION) == cupti.NOTHING:
        ours[cupti.INJECTION] = cupti.NOTHING
    if "PYTHONPATH" not in job and (site := _site_folders(environ)):
        # Ray replaces ${PYTHONPATH} by the worker's own (Ray 2.60, ray/_private/runtime_env/context.py).
        path = _python_path(given["PYTHONPATH"], site) if "PYTHONPATH" in given else _in_front("${PYTHONPATH}", site)
        given = {**given, "PYTHONPATH": path}
    result = type(runtime_env)(**runtime_env) if runtime_env else {}
    result["env_vars"] = {**ours, **given}
    return result


def _let_workers_write() -> None:
    run = runtime.current()
    if run is None:
        return
    try:
        clocks.stop()
        if (comparing := sys.modules.get("autoprof.windows.monitor")) is not None:
            comparing.stop()
        end.let_workers_write(run)
        through_ray(run)
    except Exception as error:
        interrupts.pass_on(error)
        runtime.report("ray/shutdown", error)


def _python_path(theirs: str, site: list[str]) -> str:
    """Return the user's folders and autoprof's: the user's first, but where they have a sitecustomize, which would hide
    autoprof's. That one runs the other."""
    hides = any(
        files.is_file(os.path.join(folder, name))
        for folder in filter(None, theirs.split(os.pathsep))
        for name in ("sitecustomize.py", "sitecustomize/__init__.py")
    )
    return _in_front(theirs, site) if hides else os.pathsep.join(filter(None, [theirs, *site]))


def _in_front(theirs: str, site: list[str]) -> str:
    return os.pathsep.join(filter(None, [*site, theirs]))


def _site_folders(environ: Mapping[str, str]) -> list[str]:
    """Return the folders that `autoprof run` put in front of PYTHONPATH, which workers need to find autoprof at all."""
    return [folder for folder in environ.get("AUTOPROF_SITE", "").split(os.pathsep) if folder]
