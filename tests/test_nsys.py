"""Nsight Systems without a GPU: command lines, environments, NVTX calls, and what becomes of reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private.runtime_env.nsight import parse_nsight_config
from ray.runtime_env import RuntimeEnv

from autoprof import _finish, _reports, capture, continuous, doctor, ending, listing, runtime, tools
from autoprof.behaviours import ray_nsys
from autoprof.naming import Subject
from autoprof.options import NsysOptions
from autoprof.settings import Settings
from autoprof.tools import nsys, nsys_launch
from autoprof.tools.memory import MemoryTool
from autoprof.tools.nsys import NsysTool
from autoprof.tools.torch import TorchTool
from autoprof.wrapping import CALL, Call

SUBJECT = Subject(step=2, role="actor", stage="update_actor", rank=3)
NSYS = Settings(tool=("nsys",))
VARIABLES = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "LD_PRELOAD", nsys.REPORT)


@pytest.fixture(autouse=True)
def _a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(nsys, "_windows", 0)
    monkeypatch.setattr(_reports, "_STILL_S", 0.1)
    monkeypatch.setattr(_reports, "_PAUSE_S", 0.01)


@pytest.fixture
def cuda(mocker: Any) -> list[str]:
    """What is called of torch's CUDA, in order."""
    calls: list[str] = []
    mocker.patch("torch.cuda.is_initialized", return_value=True)
    mocker.patch("torch.cuda.synchronize", side_effect=lambda: calls.append("synchronize"))
    mocker.patch("torch.cuda.profiler.start", side_effect=lambda: calls.append("start"))
    mocker.patch("torch.cuda.profiler.stop", side_effect=lambda: calls.append("stop"))
    mocker.patch("torch.cuda.nvtx.mark", side_effect=lambda text: calls.append(f"mark {text}"))
    mocker.patch("torch.cuda.nvtx.range_start", side_effect=lambda text: calls.append(f"range {text}") or 7)
    mocker.patch("torch.cuda.nvtx.range_end", side_effect=lambda number: calls.append(f"end {number}"))
    return calls


@pytest.fixture
def under_nsys(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process runs under an nsys that the user started."""
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "4711")


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This process is an actor that autoprof had Ray start under nsys; returns the report's path without endings."""
    node = SimpleNamespace(get_logs_dir_path=lambda: str(tmp_path / "logs"))
    worker = SimpleNamespace(_global_node=node, global_worker=SimpleNamespace(mode=1), WORKER_MODE=1)
    monkeypatch.setitem(sys.modules, "ray._private.worker", worker)
    monkeypatch.setenv(nsys.REPORT, nsys_launch.OUTPUT)
    folder = tmp_path / "logs" / "nsight"
    folder.mkdir(parents=True)
    return folder / f"autoprof_{os.getpid()}"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """There is an nsys on the path, and nothing else."""
    path = tmp_path / "bin" / "nsys"
    path.parent.mkdir()
    version = "NVIDIA Nsight Systems version 2026.1.1-stand-in"
    path.write_text(f'#!/bin/sh\n[ "$1" = profile ] && echo "repeat[:N][:mode]" || echo {version}\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent))
    return path


def finished(run: runtime.Runtime) -> dict[str, dict[str, Any]]:
    """The meta file of each capture, when all are there."""
    deadline = time.monotonic() + 30
    while list(run.rundir.parts()) and time.monotonic() < deadline:
        time.sleep(0.02)
    ending.wait_for_files(run)
    return {path.name.split(".rank")[0]: json.loads(path.read_text()) for path in run.rundir.path.rglob("*.meta.json")}


def record(run: runtime.Runtime, subject: Subject = SUBJECT) -> None:
    recording = capture.begin(run, subject)
    assert recording is not None
    capture.end(recording)


# What nsys is told.


def test_the_command_that_ray_makes_of_our_options(installed: Path) -> None:
    command = parse_nsight_config(nsys_launch.profile_options(NsysOptions()))
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
    assert nsys_launch.profile_options(NsysOptions())["capture-range-end"] == "repeat"
    warning = mocker.patch("autoprof.log.warning_once")
    assert ray_nsys.wanted({}, {}, NSYS)
    assert warning.call_args.args[0] == nsys_launch.AT_THE_END
    assert doctored(lambda report: doctor._check_nsys(report, NSYS)).notes == [nsys_launch.AT_THE_END]


def older(path: Path) -> None:
    path.write_text("#!/bin/sh\necho repeat[:N]\n")
    nsys_launch.writes_at_once.cache_clear()


def test_options_of_the_user() -> None:
    options = NsysOptions(trace="cuda+nvtx", sample="process-tree", python_backtrace=True, gpu_metrics="0+1")
    command = parse_nsight_config(nsys_launch.profile_options(options))
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
    env = ray_nsys.under_nsys({}, Settings(tool=("nsys",), nsys=options))
    assert env["env_vars"]["PATH"].split(":") == [os.path.dirname(sys.executable), str(other.parent), "${PATH}"]
    nsys_launch.put_on_path(options)
    assert nsys_launch.find(NsysOptions()) == str(other)
    before = os.environ["PATH"]
    nsys_launch.put_on_path(options)
    assert os.environ["PATH"] == before


# Which actors are started under it, and how.


def made_with(run: Any, **options: Any) -> Any:
    """The runtime_env that an actor is made with."""
    call = Call("ray/actor", lambda self, args=None, kwargs=None, **options: None, (object(),), dict(options))
    around = ray_nsys.Actor().around(call)
    assert next(around) is CALL
    with pytest.raises(StopIteration):
        around.send(None)
    return call.kwargs.get("runtime_env")


def test_an_actor_with_a_gpu_is_started_under_nsys(joined: Any, installed: Path) -> None:
    env = made_with(joined(tool=("nsys",)), num_gpus=0.5)
    assert isinstance(env, RuntimeEnv)
    assert env.nsight() == {**nsys_launch.profile_options(NsysOptions()), "o": "autoprof_%p"}
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
    assert [rank for rank in range(16) if ray_nsys.wanted(given[rank], {}, settings)] == [0, 8]


def test_a_user_who_profiles_the_whole_job_is_left_alone(installed: Path) -> None:
    assert not ray_nsys.wanted({}, {"_nsight": "default"}, NSYS)
    assert ray_nsys.wanted({}, {}, NSYS)


@pytest.mark.parametrize("where", ["own", "job's"])
def test_an_interpreter_that_ray_would_put_aside(where: str, installed: Path, caplog: Any, mocker: Any) -> None:
    warning = mocker.patch("autoprof.log.warning_once")
    env = {"pip": ["numpy"]}
    assert not ray_nsys.wanted(env if where == "own" else {}, env if where == "job's" else {}, NSYS)
    assert "pip of runtime_env" in warning.call_args.args[0]


def test_without_nsys_actors_are_made_as_ever_and_it_is_said(joined: Any, mocker: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    warning = mocker.patch("autoprof.log.warning_once")
    assert made_with(joined(tool=("nsys",)), num_gpus=1) is None
    assert warning.call_args.args[0] == (
        "AUTOPROF_TOOL=nsys: there is no nsys on the path; actors are not started under nsys"
    )


def test_without_a_python_beside_the_interpreter(installed: Path, mocker: Any, tmp_path: Path) -> None:
    mocker.patch("sys.executable", str(tmp_path / "python3"))
    warning = mocker.patch("autoprof.log.warning_once")
    assert not ray_nsys.wanted({}, {}, NSYS)
    assert "Ray's nsight runs `python`" in warning.call_args.args[0]


# Which tool a process takes.


def test_a_process_under_nsys_uses_nothing_else(under_nsys: None) -> None:
    for asked in [(), ("torch",), ("npu", "torch"), ("nsys",), ("torch", "nsys"), ("nsys", "memory")]:
        assert isinstance(tools.choose(Settings(tool=asked)), NsysTool), asked


def test_nobodys_session_is_disturbed(made: Any, cuda: list[str], under_nsys: None, mocker: Any) -> None:
    """Somebody else runs this under nsys, and autoprof was not asked to take part."""
    warning = mocker.patch("autoprof.log.warning_once")
    assert capture.begin(made(tool=("torch",)), SUBJECT) is None
    assert cuda == []
    assert "this process runs under nsys, which has CUPTI" in warning.call_args.args[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NSYS_PROFILING_SESSION_ID", "1"),
        (nsys.REPORT, "autoprof_%p"),
        ("LD_PRELOAD", "/opt/nvidia/nsight-systems/target-linux-x64/libToolsInjectionProxy64.so"),
        ("CUDA_INJECTION64_PATH", "/opt/nvidia/target-linux-x64/libToolsInjection64.so"),
    ],
)
def test_how_a_process_knows(name: str, value: str) -> None:
    assert nsys.here({name: value})
    assert not nsys.here({"LD_PRELOAD": "/usr/lib/libjemalloc.so"})


def test_elsewhere_torch_records_and_it_is_said_once(mocker: Any) -> None:
    warning = mocker.patch("autoprof.log.warning_once")
    assert isinstance(tools.choose(NSYS), TorchTool)
    assert "this process does not run under nsys; torch.profiler records instead" in warning.call_args.args[0]


def test_the_memory_history_alone_stays_so(under_nsys: None, mocker: Any) -> None:
    mocker.patch.object(MemoryTool, "unavailable", return_value="")
    assert isinstance(tools.choose(Settings(tool=("memory",))), MemoryTool)


# A window.


def test_a_window_in_calls(made: Any, cuda: list[str], under_nsys: None) -> None:
    run = made(tool=("nsys",), contents=("cpu", "cuda", "shapes"))
    record(run)
    start, mark, begin, end, synchronize, stop = cuda
    assert [start, begin, end, synchronize, stop] == [
        "start",
        "range step 2 actor.update_actor",
        "end 7",
        "synchronize",
        "stop",
    ]
    stamp = json.loads(mark.removeprefix("mark "))["autoprof"]
    assert (stamp["global_step"], stamp["role"], stamp["stage"], stamp["rank"]) == (2, "actor", "update_actor", 3)


def test_ranges_in_the_window_of_a_whole_step(made: Any, cuda: list[str], under_nsys: None) -> None:
    run = made(tool=("nsys",), mode="continuous")
    for stage in ("compute_log_prob", "update_actor"):
        leave = continuous.enter(run, Subject(step=2, role="actor", stage=stage, rank=3), run.settings)
        assert leave is not None
        leave()
    continuous.end()
    ranges = [call for call in cuda if call.startswith("range")]
    assert ranges == ["range global_step 2", "range actor.compute_log_prob", "range actor.update_actor"]
    assert (cuda[0], cuda[-1], cuda.count("start")) == ("start", "stop", 1)


def test_ranges_inside_of_a_stage_have_their_own_names(made: Any, cuda: list[str], under_nsys: None) -> None:
    recording = capture.begin(made(tool=("nsys",)), SUBJECT)
    assert recording is not None
    recording.mark("mini_batch 0")()
    capture.end(recording)
    assert [call for call in cuda if call.startswith("range")] == [
        "range step 2 actor.update_actor",
        "range mini_batch 0",
    ]


def test_the_report_of_the_users_own_command_stays_where_it_is(made: Any, cuda: list[str], under_nsys: None) -> None:
    run = made(tool=("nsys",))
    record(run)
    (meta,) = finished(run).values()
    assert (meta["tool"], meta["state"], meta["reason"]) == ("nsys", "complete", _reports.OWN_COMMAND)
    assert [path.name for path in run.rundir.step(2).iterdir() if "meta" not in path.name] == []


def test_without_cuda_a_meta_file_says_so(made: Any, under_nsys: None) -> None:
    run = made(tool=("nsys",))
    with pytest.raises(RuntimeError, match="CUDA is not initialised"):
        capture.begin(run, SUBJECT)
    (meta,) = finished(run).values()
    assert meta["state"] == "failed"
    assert "CUDA is not initialised in this process" in meta["reason"]


def test_without_nvtx_windows_are_recorded_all_the_same(
    made: Any, cuda: list[str], under_nsys: None, mocker: Any
) -> None:
    for name in ("mark", "range_start"):
        mocker.patch(f"torch.cuda.nvtx.{name}", side_effect=RuntimeError("NVTX functions not installed"))
    record(made(tool=("nsys",)))
    assert cuda == ["start", "synchronize", "stop"]


def test_a_window_is_closed_though_the_device_failed(made: Any, cuda: list[str], under_nsys: None, mocker: Any) -> None:
    mocker.patch("torch.cuda.synchronize", side_effect=RuntimeError("an illegal memory access"))
    recording = capture.begin(made(tool=("nsys",)), SUBJECT)
    with pytest.raises(RuntimeError):
        capture.end(recording)
    assert cuda[-1] == "stop"


def test_a_child_of_an_actor_under_nsys_records_nothing(made: Any, cuda: list[str], monkeypatch: Any) -> None:
    monkeypatch.setenv(nsys.REPORT, "autoprof_%p")
    assert capture.begin(made(tool=("nsys",)), SUBJECT) is None
    assert cuda == []


# What becomes of reports.


def job(folder: Path, report: Path | str, number: int = 1, **more: Any) -> dict[str, Any]:
    """What `_finish.py` gets for a window of this process."""
    raw = folder / "x.nsys-rep.part"
    raw.write_text(json.dumps({"report": str(report), "number": number, "pid": os.getpid(), "patience_s": 0.3} | more))
    return {
        "raw": str(raw),
        "base": str(folder / "x"),
        "trace": str(folder / "x.pt.trace.json.gz"),
        "meta_path": str(folder / "x.meta.json"),
        "meta": {"state": "complete", "reason": "", "bytes": 0},
        "max_bytes": 1000,
        "python": sys.executable,
    }


def meta_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "x.meta.json").read_text())
    return content


@pytest.fixture
def reports(mocker: Any) -> None:
    """`_finish` takes the module that this one has set the pauses of."""
    mocker.patch.object(_finish, "_beside", return_value=_reports)


def test_windows_are_paired_with_reports_by_their_order(made: Any, cuda: list[str], actor: Path) -> None:
    run = made(tool=("nsys",))
    stages = ["compute_log_prob", "update_actor", "update_weights"]
    for number, stage in enumerate(stages, 1):
        record(run, Subject(step=2, role="actor", stage=stage, rank=0))
        Path(f"{actor}.{number}.nsys-rep").write_text(stage)
    found = finished(run)
    assert sorted(found) == [f"actor.{stage}" for stage in stages]
    assert {(meta["state"], meta["reason"]) for meta in found.values()} == {("complete", "")}
    for stage in stages:
        (path,) = run.rundir.step(2).glob(f"actor.{stage}.rank0.*.nsys-rep")
        assert path.read_text() == stage
        assert found[f"actor.{stage}"]["bytes"] == len(stage)
    # The names stay taken.
    assert sorted(path.stat().st_size for path in actor.parent.iterdir()) == [0, 0, 0]
    (step,) = listing.read(run.rundir.path).steps
    assert [(capture.state, capture.bytes) for capture in step.captures] == [
        ("complete", len(stage)) for stage in stages
    ]


def test_a_window_that_did_not_open_has_no_number(made: Any, cuda: list[str], actor: Path, mocker: Any) -> None:
    run = made(tool=("nsys",))
    start = mocker.patch("torch.cuda.profiler.start", side_effect=RuntimeError("no"))
    with pytest.raises(RuntimeError):
        capture.begin(run, SUBJECT)
    start.side_effect = None
    record(run, Subject(step=2, role="actor", stage="update_weights", rank=3))
    Path(f"{actor}.1.nsys-rep").write_text("the only one")
    states = {name: meta["state"] for name, meta in finished(run).items()}
    assert states == {"actor.update_actor": "failed", "actor.update_weights": "complete"}


def test_a_report_without_number_is_the_first_windows(reports: None, tmp_path: Path) -> None:
    (tmp_path / "r.nsys-rep").write_text("x")
    _finish.finish(job(tmp_path, tmp_path / "r"))
    assert meta_of(tmp_path)["state"] == "complete"
    _finish.finish(job(tmp_path, tmp_path / "r", number=2, pid=2**30))
    assert meta_of(tmp_path)["state"] == "failed"


def test_a_report_that_is_being_written_is_waited_for(reports: None, tmp_path: Path) -> None:
    report, unfinished = tmp_path / "r.1.nsys-rep", tmp_path / "r.1.qdstrm"
    unfinished.write_text("")
    report.write_text("a")
    given = job(tmp_path, tmp_path / "r")
    os.utime(given["raw"], (0, 0))

    def write() -> None:
        for _ in range(5):
            time.sleep(0.05)
            with report.open("a") as file:
                file.write("b")
        unfinished.unlink()

    thread = threading.Thread(target=write)
    thread.start()
    _finish.finish(given)
    thread.join()
    assert (tmp_path / "x.nsys-rep").read_text() == "abbbbb"
    assert meta_of(tmp_path)["bytes"] == 6
    assert not Path(given["raw"]).exists()


def test_who_waits_is_seen_to_be_alive(reports: None, tmp_path: Path) -> None:
    given = job(tmp_path, tmp_path / "r", pid=2**30)
    os.utime(given["raw"], (0, 0))
    times: list[float] = []

    def look() -> None:
        while Path(given["raw"]).exists():
            try:
                times.append(Path(given["raw"]).stat().st_mtime)
            except FileNotFoundError:
                return
            time.sleep(0.02)

    thread = threading.Thread(target=look)
    thread.start()
    _finish.finish(given)
    thread.join()
    assert times[-1] > time.time() - 60


def test_a_report_that_never_comes(reports: None, tmp_path: Path) -> None:
    _finish.finish(job(tmp_path, tmp_path / "r", pid=2**30))
    meta = meta_of(tmp_path)
    assert meta["state"] == "failed"
    assert f"nsys left no report {tmp_path}/r.1.nsys-rep within" in meta["reason"]
    assert [path.name for path in tmp_path.iterdir()] == ["x.meta.json"]


def test_a_report_that_comes_with_the_end_of_the_process(reports: None, tmp_path: Path, mocker: Any) -> None:
    """Nobody waits for it meanwhile."""
    mocker.patch.object(_reports, "_LONG_PAUSE_S", 0.05)
    with subprocess.Popen(["sleep", "60"]) as process:
        given = job(tmp_path, tmp_path / "r", pid=process.pid, patience_s=0.2)
        thread = threading.Thread(target=_finish.finish, args=(given,))
        thread.start()
        time.sleep(0.5)
        os.utime(given["raw"], (0, 0))
        time.sleep(0.3)
        assert os.stat(given["raw"]).st_mtime == 0
        (tmp_path / "r.1.nsys-rep").write_text("late")
        process.kill()
    thread.join()
    assert (tmp_path / "x.nsys-rep").read_text() == "late"
    assert meta_of(tmp_path)["state"] == "complete"


def test_without_another_process_the_wait_is_short(reports: None, tmp_path: Path) -> None:
    _finish.finish(job(tmp_path, tmp_path / "r") | {"python": ""})
    assert "within 0.3 s after the window" in meta_of(tmp_path)["reason"]


def test_a_report_on_another_file_system(reports: None, tmp_path: Path, mocker: Any) -> None:
    report = tmp_path / "r.1.nsys-rep"
    report.write_text("across")
    mocker.patch("os.rename", side_effect=OSError(18, "Invalid cross-device link"))
    _finish.finish(job(tmp_path, tmp_path / "r"))
    assert (tmp_path / "x.nsys-rep").read_text() == "across"
    assert report.stat().st_size == 0


def test_it_is_taken_by_a_process_without_site(made: Any, cuda: list[str], actor: Path) -> None:
    """The whole way, with the process that finishes captures, which outlives this one."""
    run = made(tool=("nsys",))
    record(run)
    Path(f"{actor}.1.nsys-rep").write_text("report")
    (meta,) = finished(run).values()
    assert (meta["state"], meta["bytes"]) == ("complete", 6)


# What is said.


def doctored(check: Callable[[doctor.Report], None]) -> doctor.Report:
    report = doctor.Report(subject="x")
    check(report)
    return report


def test_doctor_says_when_nsys_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (problem,) = doctored(lambda report: doctor._check_nsys(report, NSYS)).problems
    assert "AUTOPROF_TOOL asks for nsys, but there is no nsys on the path" in problem
    assert doctored(lambda report: doctor._check_nsys(report, Settings())).problems == []


def test_doctor_says_which_nsys_it_is(installed: Path) -> None:
    report = doctored(lambda report: doctor._check_nsys(report, NSYS))
    assert report.facts["nsys"] == f"2026.1.1-stand-in ({installed})"
    assert report.problems == []


def test_doctor_names_who_takes_cupti(installed: Path, under_nsys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (note,) = doctored(lambda report: doctor._check_nsys(report, Settings())).notes
    assert "the only CUPTI subscription" in note
    monkeypatch.setenv("KINETO_USE_DAEMON", "1")
    assert "CUPTI" in doctored(lambda report: doctor._check_nsys(report, NSYS)).problems[0]


def test_an_nsys_that_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "nsys"
    path.write_text("#!/bin/sh\nexit 3\n")
    path.chmod(0o755)
    assert nsys_launch.version(str(path)) == "of unknown version"
    assert not nsys_launch.writes_at_once(str(path))


def test_what_processes_would_take() -> None:
    assert tools.outlook(("nsys",)) == "nsys in processes that run under it, torch in others (AUTOPROF_TOOL)"
    assert tools.outlook(("nsys", "memory", "torch")).startswith("nsys in processes that run under it, torch in")
