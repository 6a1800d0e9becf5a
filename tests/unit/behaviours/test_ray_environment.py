"""Content of `runtime_env`, against Ray's own merging."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ray.job_config import JobConfig
from ray.runtime_env import RuntimeEnv
from ray.runtime_env.runtime_env import _merge_runtime_env

from autoprof.behaviours.ray import chosen_runtime_env, job_with_site, merged
from autoprof.capture.profilers import foreign

ENVIRON = {"AUTOPROF": "1", "AUTOPROF_STEPS": "3", "AUTOPROF_RUN_ID": "x", "HOME": "/root"}
OURS = {name: value for name, value in ENVIRON.items() if name != "HOME"}


@pytest.mark.parametrize("runtime_env", [None, {}, {"env_vars": None}, {"env_vars": {}}])
def test_our_variables_are_added(runtime_env: Any) -> None:
    assert merged(runtime_env, ENVIRON)["env_vars"] == OURS


def test_the_users_values_win_and_stay_as_they_were() -> None:
    runtime_env = {"working_dir": "/x", "env_vars": {"AUTOPROF_STEPS": "9", "A": "b"}}
    result = merged(runtime_env, ENVIRON)
    assert result["env_vars"] == OURS | {"AUTOPROF_STEPS": "9", "A": "b"}
    assert result["working_dir"] == "/x"
    assert runtime_env == {"working_dir": "/x", "env_vars": {"AUTOPROF_STEPS": "9", "A": "b"}}


def test_the_destination_of_collect_is_not_passed_to_ray() -> None:
    assert merged(None, ENVIRON | {"AUTOPROF_COLLECT": "sftp://me:secret@host/x"})["env_vars"] == OURS


def test_a_runtime_env_object_stays_one() -> None:
    result = merged(RuntimeEnv(env_vars={"A": "b"}), ENVIRON)
    assert isinstance(result, RuntimeEnv)
    assert result["env_vars"] == OURS | {"A": "b"}


def test_variables_of_a_submitted_job_are_left_to_the_job() -> None:
    # Ray refuses a variable that both the job and ray.init set.
    job = {"env_vars": {"AUTOPROF": "1", "AUTOPROF_STEPS": "3"}}
    environ = ENVIRON | {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": job})}
    ours = merged(None, environ)
    together = _merge_runtime_env(RuntimeEnv(**job), RuntimeEnv(**ours))
    assert together is not None
    assert together["env_vars"] == OURS
    assert _merge_runtime_env(RuntimeEnv(**job), RuntimeEnv(**merged(None, ENVIRON))) is None


def test_the_site_folder_goes_behind_the_users_pythonpath_and_in_front_of_the_clusters() -> None:
    environ = ENVIRON | {"AUTOPROF_SITE": "/site"}
    assert merged(None, environ)["env_vars"]["PYTHONPATH"] == "/site:${PYTHONPATH}"
    assert merged({"env_vars": {"PYTHONPATH": "/mine"}}, environ)["env_vars"]["PYTHONPATH"] == "/mine:/site"


def test_the_runtime_env_of_a_job_config_is_kept() -> None:
    config = JobConfig(runtime_env={"env_vars": {"MY_SETTING": "mine"}})
    runtime_env = chosen_runtime_env({"job_config": config}, ENVIRON)
    assert merged(runtime_env, ENVIRON)["env_vars"] == OURS | {"MY_SETTING": "mine"}
    # As in ray.init: its argument has priority over the JobConfig, and a submitted job over both.
    assert chosen_runtime_env({"job_config": config, "runtime_env": {"env_vars": {}}}, ENVIRON) == {"env_vars": {}}
    assert chosen_runtime_env({"job_config": config}, {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}) is None


def test_a_sitecustomize_of_the_users_comes_behind_the_one_that_runs_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").touch()
    runtime_env = {"env_vars": {"PYTHONPATH": str(tmp_path)}}
    assert merged(runtime_env, ENVIRON | {"AUTOPROF_SITE": "/site"})["env_vars"]["PYTHONPATH"] == f"/site:{tmp_path}"


def test_an_empty_pythonpath_does_not_become_the_working_directory() -> None:
    worker = merged({"env_vars": {"PYTHONPATH": ""}}, ENVIRON | {"AUTOPROF_SITE": "/site"})
    assert worker["env_vars"]["PYTHONPATH"] == "/site"


def test_a_submitted_job_keeps_its_pythonpath_in_front_of_the_site_folder() -> None:
    job = {"runtime_env": {"env_vars": {"PYTHONPATH": "/mine", "A": "b"}}, "metadata": {"x": "y"}}
    environ = ENVIRON | {"AUTOPROF_SITE": "/site", "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}
    parent = json.loads(job_with_site(json.dumps(job), environ))
    together = _merge_runtime_env(RuntimeEnv(**parent["runtime_env"]), RuntimeEnv(**merged(None, environ)))
    assert together is not None
    assert together["env_vars"] == OURS | {"AUTOPROF_SITE": "/site", "PYTHONPATH": "/mine:/site", "A": "b"}
    assert parent["metadata"] == {"x": "y"}


def test_workers_get_the_guard_of_cupti() -> None:
    environ = ENVIRON | {"NVTX_INJECTION64_PATH": "/cuda/libcupti.so"}
    assert foreign.free_cupti((), environ)
    ours = merged(None, environ)["env_vars"]
    assert ours == OURS | {"NVTX_INJECTION64_PATH": foreign.NOTHING}
    # A worker checks it itself if its node's image sets the variable.
    elsewhere = ours | {"NVTX_INJECTION64_PATH": "/other/libcupti.so.12"}
    assert foreign.free_cupti((), elsewhere)
    assert elsewhere["NVTX_INJECTION64_PATH"] == foreign.NOTHING


def test_the_users_variables_for_workers_are_kept() -> None:
    environ = ENVIRON | {"NVTX_INJECTION64_PATH": foreign.NOTHING}
    theirs = {"NVTX_INJECTION64_PATH": "/cuda/libcupti.so"}
    worker = merged({"env_vars": theirs}, environ)["env_vars"]
    assert worker["NVTX_INJECTION64_PATH"] == "/cuda/libcupti.so"
    assert not foreign.free_cupti((), worker)
    job = {"env_vars": theirs}
    ours = merged(None, environ | {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": job})})
    together = _merge_runtime_env(RuntimeEnv(**job), RuntimeEnv(**ours))
    assert together is not None
    assert together["env_vars"]["NVTX_INJECTION64_PATH"] == "/cuda/libcupti.so"
    assert not foreign.free_cupti((), together["env_vars"])


def test_verls_own_guard_stays() -> None:
    theirs = {"NVTX_INJECTION64_PATH": "/nonexistent/verl-disabled-nvtx-injection.so"}
    environ = ENVIRON | {"NVTX_INJECTION64_PATH": foreign.NOTHING}
    assert merged({"env_vars": theirs}, environ)["env_vars"]["NVTX_INJECTION64_PATH"] == theirs["NVTX_INJECTION64_PATH"]
