"""Command line of nsys, actors under nsys, and doctor's check of nsys."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray._private.runtime_env.nsight import parse_nsight_config
from ray.runtime_env import RuntimeEnv

from autoprof.behaviours import ray as ray_behaviours
from autoprof.capture import profilers
from autoprof.capture.profilers import nsys
from autoprof.cli import doctor_environment as environment
from autoprof.cli.documents import Report
from autoprof.config.settings import Settings
from autoprof.config.values import NsysOptions
from autoprof.hooks.behaviour import CALL, Call
from tests.support.nsys_runs import NSYS


def test_the_command_that_ray_makes_of_our_options(installed: Path) -> None:
    command = parse_nsight_config(nsys.profile_options(NsysOptions()))
    assert command == [
        "nsys",
        "profile",
        "--trace=cuda,nvtx,osrt,cublas,cudnn",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=repeat:async",
        "--kill=none",
        "--wait=primary",
        "--stop-on-exit=true",
        "--force-overwrite=true",
    ]


def test_an_older_nsys_is_asked_for_what_it_knows(installed: Path, mocker: Any) -> None:
    older(installed)
    assert nsys.profile_options(NsysOptions())["capture-range-end"] == "repeat"
    warning = mocker.patch("autoprof.base.log.warning_once")
    assert ray_behaviours.runs_under_nsys({}, {}, NSYS)
    assert warning.call_args.args[0] == nsys.AT_THE_END
    assert doctored(lambda report: environment._check_nsys(report, NSYS)).notes == [nsys.AT_THE_END]


def older(path: Path) -> None:
    path.write_text("#!/bin/sh\necho repeat[:N]\n")
    nsys.writes_at_once.cache_clear()


def test_options_of_the_user() -> None:
    options = NsysOptions(trace="cuda+nvtx", sample="process-tree", python_backtrace=True, gpu_metrics="0+1")
    command = parse_nsight_config(nsys.profile_options(options))
    assert {"--trace=cuda,nvtx", "--sample=process-tree", "--cpuctxsw=process-tree"} < set(command)
    assert {"--python-backtrace=cuda", "--gpu-metrics-devices=0,1"} < set(command)


def test_an_nsys_that_is_not_the_first_on_the_path(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other" / "nsys"
    other.parent.mkdir()
    other.write_bytes(installed.read_bytes())
    other.chmod(0o755)
    options = NsysOptions(executable=str(other))
    env = ray_behaviours.under_nsys({}, Settings(tool=("nsys",), nsys=options))
    assert env["env_vars"]["PATH"].split(":") == [os.path.dirname(sys.executable), str(other.parent), "${PATH}"]
    nsys.put_on_path(options)
    assert nsys.find_nsys(NsysOptions()) == str(other)
    before = os.environ["PATH"]
    nsys.put_on_path(options)
    assert os.environ["PATH"] == before


def made_with(run: Any, **options: Any) -> Any:
    """Return the runtime_env of a new actor."""
    call = Call("ray/actor", lambda self, args=None, kwargs=None, **options: None, (object(),), dict(options), run)
    around = ray_behaviours.Actor().around(call)
    assert next(around) is CALL
    with pytest.raises(StopIteration):
        around.send(None)
    return call.kwargs.get("runtime_env")


def test_an_actor_with_a_gpu_is_started_under_nsys(joined: Any, installed: Path) -> None:
    env = made_with(joined(tool=("nsys",)), num_gpus=0.5)
    assert isinstance(env, RuntimeEnv)
    assert env.nsight() == {**nsys.profile_options(NsysOptions()), "o": "autoprof_%p"}
    assert env.env_vars() == {
        "PATH": f"{os.path.dirname(sys.executable)}:${{PATH}}",
        "AUTOPROF_NSYS_REPORT": "autoprof_%p",
    }


def test_what_the_user_put_into_the_runtime_env_stays(joined: Any, installed: Path) -> None:
    given = RuntimeEnv(env_vars={"RANK": "0", "PATH": "/mine"})
    env = made_with(joined(tool=("nsys",)), num_gpus=1, runtime_env=given)
    assert env.env_vars()["RANK"] == "0"
    assert env.env_vars()["PATH"] == f"{os.path.dirname(sys.executable)}:/mine"
    assert given == RuntimeEnv(env_vars={"RANK": "0", "PATH": "/mine"})


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"tool": ("torch",)}, {"num_gpus": 1}),
        ({"tool": ("nsys",)}, {"num_gpus": 0}),
        ({"tool": ("nsys",)}, {"num_gpus": None}),
        ({"tool": ("nsys",)}, {}),
        ({"tool": ("nsys",)}, {"num_gpus": 1, "runtime_env": RuntimeEnv(nsight={"t": "cuda"})}),
        ({"tool": ("nsys",)}, {"num_gpus": 1, "runtime_env": RuntimeEnv(env_vars={"RANK": "1"})}),
    ],
)
def test_other_actors_are_left_alone(
    joined: Any, installed: Path, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    assert made_with(joined(**settings), **options) is options.get("runtime_env")


def test_a_rank_that_one_role_asks_for(installed: Path) -> None:
    settings = Settings(tool=("nsys",), ranks="0", role={"actor": {"ranks": "0,8"}})
    given = [{"env_vars": {"RANK": str(rank)}} for rank in range(16)]
    assert [rank for rank in range(16) if ray_behaviours.runs_under_nsys(given[rank], {}, settings)] == [0, 8]


def test_a_user_who_profiles_the_whole_job_is_left_alone(installed: Path) -> None:
    assert not ray_behaviours.runs_under_nsys({}, {"_nsight": "default"}, NSYS)
    assert ray_behaviours.runs_under_nsys({}, {}, NSYS)


@pytest.mark.parametrize("where", ["own", "job's"])
def test_an_interpreter_that_ray_would_put_aside(where: str, installed: Path, caplog: Any, mocker: Any) -> None:
    warning = mocker.patch("autoprof.base.log.warning_once")
    env = {"pip": ["numpy"]}
    assert not ray_behaviours.runs_under_nsys(env if where == "own" else {}, env if where == "job's" else {}, NSYS)
    assert "pip of runtime_env" in warning.call_args.args[0]


def test_without_nsys_actors_are_made_as_ever_and_it_is_said(joined: Any, mocker: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    warning = mocker.patch("autoprof.base.log.warning_once")
    assert made_with(joined(tool=("nsys",)), num_gpus=1) is None
    assert warning.call_args.args[0] == (
        "AUTOPROF_TOOL=nsys: there is no nsys on the path; actors are not started under nsys"
    )


def test_without_a_python_beside_the_interpreter(installed: Path, mocker: Any, tmp_path: Path) -> None:
    mocker.patch("sys.executable", str(tmp_path / "python3"))
    warning = mocker.patch("autoprof.base.log.warning_once")
    assert not ray_behaviours.runs_under_nsys({}, {}, NSYS)
    assert "Ray's nsight plug-in runs `python`" in warning.call_args.args[0]


def doctored(check: Callable[[Report], None]) -> Report:
    report = Report(subject="x")
    check(report)
    return report


def test_doctor_says_when_nsys_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (problem,) = doctored(lambda report: environment._check_nsys(report, NSYS)).problems
    assert "AUTOPROF_TOOL asks for nsys, but nsys is not on the PATH" in problem
    assert doctored(lambda report: environment._check_nsys(report, Settings())).problems == []


def test_doctor_says_which_nsys_it_is(installed: Path) -> None:
    report = doctored(lambda report: environment._check_nsys(report, NSYS))
    assert report.facts["nsys"] == f"2026.1.1-stand-in ({installed})"
    assert report.problems == []


def test_doctor_names_who_takes_cupti(installed: Path, under_nsys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (note,) = doctored(lambda report: environment._check_nsys(report, Settings())).notes
    assert "the only CUPTI subscription" in note
    monkeypatch.setenv("KINETO_USE_DAEMON", "1")
    assert "CUPTI" in doctored(lambda report: environment._check_nsys(report, NSYS)).problems[0]


def test_an_nsys_that_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "nsys"
    path.write_text("#!/bin/sh\nexit 3\n")
    path.chmod(0o755)
    assert nsys.nsys_version(str(path)) == "of unknown version"
    assert not nsys.writes_at_once(str(path))


def test_what_processes_would_take() -> None:
    assert profilers.outlook(("nsys",)) == "nsys in processes that run under it, torch in others (AUTOPROF_TOOL)"
    assert profilers.outlook(("nsys", "memory", "torch")).startswith("nsys in processes that run under it, torch in")
