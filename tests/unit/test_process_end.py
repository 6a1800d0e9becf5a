"""Processes that end during a window, in different ways: files are correct, and the next run reports lost captures."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autoprof.base.identity import HOST
from autoprof.cli import main
from autoprof.report import build
from autoprof.rundir import deaths, layout, runs
from autoprof.rundir.layout import RunDir, write_json
from autoprof.rundir.records import RunFile
from tests.support.helpers import Python, clean_environment
from tests.support.small_trainer import metas, warnings


def the_run(folder: Path) -> runs.Run:
    return runs.find(folder / "autoprof_runs", "latest")


@pytest.mark.fault(
    "os._exit, SIGTERM, SIGKILL in a window", "ends as without autoprof", "the capture; ls and doctor say `unfinished`"
)
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_the_lost_capture_of_a_process_that_ends_in_a_window_is_listed(
    go: Python, tmp_path: Path, end: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    died = go(f"Trainer().fit(lambda: {end})", check=False)
    assert died.returncode == status
    assert warnings(died) == []
    run = the_run(tmp_path)
    assert run.state == "unfinished"
    ((capture,),) = [step.captures for step in run.steps]
    assert (capture.name.split(".rank0")[0], capture.state, capture.bytes) == ("actor.update_actor", "unfinished", 0)
    assert main.main(["doctor", run.path]) == 1
    assert "actor.update_actor.rank0" in capsys.readouterr().out


@pytest.mark.fault("the previous run was killed", "reports it in one line", "nothing")
def test_only_the_next_run_reports_that_a_run_was_killed(go: Python, tmp_path: Path) -> None:
    go("Trainer().fit(lambda: os._exit(3))", check=False)
    run = the_run(tmp_path)
    (warning,) = warnings(go("Trainer().fit(steps=1)"))
    assert warning.startswith(f"autoprof: the previous run, {run.id}: its process ")
    assert warning.endswith(f" was killed, crashed, or ended by os._exit or os.exec; see autoprof doctor {run.id}")
    assert warnings(go("Trainer().fit(steps=1)")) == []


@pytest.mark.fault("a rank is killed in a window", "reports the capture in one line at its end", "the capture")
def test_a_run_reports_unfinished_captures_at_its_end(go: Python, tmp_path: Path) -> None:
    (warning,) = warnings(
        go("""
if os.fork() == 0:
    Trainer().fit(lambda: os._exit(3))
os.wait()
""")
    )
    run = the_run(tmp_path)
    assert run.state == "ended"
    lost = f"captures were cut off: global_step_000002/{run.captures[0].name}"
    assert warning == f"autoprof: {lost}; see autoprof doctor {run.id}"
    assert warnings(go("Trainer().fit(steps=1)")) == []


def test_the_first_three_unfinished_captures_are_named_and_the_others_counted(go: Python, tmp_path: Path) -> None:
    (warning,) = warnings(
        go("""
from pathlib import Path
from autoprof.run import end, runtime
def made(*names):
    for name in names:
        Path(runtime.current().rundir.step(2), name).touch()
def wait(run, wait_for_files=end.wait_for_files):
    wait_for_files(run)
    made(*(f"{name}.meta.json.part" for name in ("whole", *"abcde")), "whole.meta.json", "e.pt.trace.json.part")
end.wait_for_files = wait
Trainer().fit()
""")
    )
    assert (
        "captures were cut off: global_step_000002/a, global_step_000002/b, global_step_000002/c and 1 more; "
        in warning
    )


@pytest.mark.fault("SIGKILL while a trace is written", "ends as without autoprof", "the trace; a `.part` remains")
def test_no_file_of_a_process_killed_while_it_writes_has_a_final_name(go: Python, tmp_path: Path) -> None:
    code = """
from autoprof.capture.profilers import torch as tool
def export(self, path):
    with open(path + ".tmp", "w") as file:
        file.write('{"traceEvents": [')
    os.kill(os.getpid(), signal.SIGKILL)
tool.TorchTool.export = export
Trainer().fit()
"""
    go(code, check=False)
    names = {path.name.split(".pid")[1].lstrip("0123456789") for path in Path(the_run(tmp_path).steps and
             the_run(tmp_path).path, "global_step_000002").iterdir()}  # fmt: skip
    assert names == {".meta.json.part", ".pt.trace.json.part", ".pt.trace.json.part.tmp"}
    assert [capture.state for capture in the_run(tmp_path).captures] == ["unfinished"]


@pytest.mark.fault("SIGKILL of the compression", "continues", "the trace; a `.part` remains")
def test_no_file_of_a_killed_compression_has_a_final_name(tmp_path: Path, python: Python) -> None:
    (tmp_path / "x.pt.trace.json.part").write_bytes(os.urandom(100_000))
    (tmp_path / "x.meta.json.part").touch()
    job = {"raw": "x.pt.trace.json.part", "trace": "x.pt.trace.json.gz", "meta_path": "x.meta.json", "meta": {}}
    code = f"""
import os, signal
from autoprof.capture import finisher
def copy(source, target, end):
    target.write(source.read(50_000)); os.kill(os.getpid(), signal.SIGKILL)
finisher.copy = copy
finisher.finish({job!r} | {{"max_bytes": 1e9}})
"""
    assert python(code, check=False).returncode == -signal.SIGKILL
    assert all(path.name.endswith(".part") for path in tmp_path.iterdir())


@pytest.mark.fault("the script ends inside a stage", "ends with its own status", "the rest of the trace; `truncated`")
@pytest.mark.parametrize(
    ("end", "status", "state", "reason"), [("sys.exit(7)", 7, "truncated", "the stage raised SystemExit")]
)
def test_a_script_that_ends_inside_a_stage_has_a_truncated_trace(
    go: Python, tmp_path: Path, end: str, status: int, state: str, reason: str
) -> None:
    ended = go(f"Trainer().fit(lambda: {end})", check=False)
    assert ended.returncode == status
    assert [(meta["state"], meta["reason"]) for meta in metas(tmp_path)] == [(state, reason)]
    assert warnings(ended) == [f"autoprof: step 2, actor update_actor: the capture ends early, {reason}"]
    assert the_run(tmp_path).outcome == f"failed (exit status {status})"
    (trace,) = Path(the_run(tmp_path).path).rglob("*.gz")
    assert any(
        event.get("name") == "aten::mm" for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    )


@pytest.mark.fault("the script ends, a thread is in a window", "ends with its own status", "nothing with a final name")
@pytest.mark.parametrize(
    ("daemon", "lasts_s", "state"), [(True, 1, "complete"), (False, 1, "complete"), (True, 60, "failed")]
)
def test_a_script_can_end_while_a_thread_is_in_a_window(
    go: Python, tmp_path: Path, daemon: bool, lasts_s: int, state: str
) -> None:
    code = f"""
there = threading.Event()
thread = threading.Thread(target=lambda: Trainer().fit(lambda: (there.set(), time.sleep({lasts_s}))), daemon={daemon})
thread.start()
there.wait()
"""
    ended = go(code, check=False)
    assert "Traceback" not in ended.stderr
    assert [meta["state"] for meta in metas(tmp_path)] == [state]
    # If a daemon thread is in a profiler, which can't be stopped then, torch may crash at exit (2.13).
    assert ended.returncode in ((0, -signal.SIGSEGV) if state == "failed" else (0,))


def test_the_users_signal_handlers_are_kept(go: Python) -> None:
    code = "print([signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)])"
    assert go(f"Trainer().fit(); {code}").stdout == go(code, AUTOPROF="0").stdout


def test_a_run_whose_pid_was_reused_is_unfinished(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "one")
    info = {"id": "one", "state": "running", "host": HOST, "pid": os.getpid(), "ticks": 1}
    write_json(run.run_json, info)
    assert runs.read(run.path).state == "unfinished"
    assert "its process" in runs.killed(run.path)
    write_json(run.run_json, info | {"host": "another"})
    assert runs.read(run.path).state == "running"
    assert runs.killed(run.path) == ""


def test_a_run_whose_process_is_a_zombie_is_unfinished(tmp_path: Path) -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    info = layout.record({"state": "running", "host": HOST, "pid": child.pid}, RunFile)
    assert runs.state(info, tmp_path) == "unfinished"
    child.wait()


@contextmanager
def started(folder: Path, script: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a script under autoprof, and wait for a line of its output. Then let it read a line and end."""
    environment, pipe = clean_environment(AUTOPROF="1", AUTOPROF_STEPS="", **variables), subprocess.PIPE
    (folder / "start.py").write_text(script)
    command = [sys.executable, "start.py"]
    with subprocess.Popen(command, cwd=folder, env=environment, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waits\n"
        yield process
        process.communicate(b"\n", timeout=60)


def test_a_process_that_has_ended_its_run_and_lives_is_in_every_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOPROF_LOOK_MS", "0")
    script = """
import atexit
atexit.register(lambda: (print("waits", flush=True), input()))
import autoprof
with autoprof.step(1):
    pass
"""
    with started(tmp_path, script):
        run = the_run(tmp_path)
        assert run.state == "ended"
        assert main.main(["ls", run.path]) == 0
        assert "ended (1 process still running)" in capsys.readouterr().out
        assert main.main(["doctor", run.path]) == 1
        told = capsys.readouterr().out
        assert "state: ended (1 process still running)" in told
        assert "reported its end " in told
        assert build.report_figures(build.ReportRequest(run=run)).state == "ended (1 process still running)"
    assert the_run(tmp_path).outcome == "ended"


@pytest.mark.parametrize(("end", "variables"), [("pass", {}), ("os.kill(os.getpid(), 9)", {}), ("pass", {"RANK": "1"})])
def test_a_launcher_without_hooks_is_the_process_that_started_the_run(
    tmp_path: Path, end: str, variables: dict[str, str]
) -> None:
    (tmp_path / "train.py").write_text(f"import autoprof, os\nwith autoprof.step(1):\n    {end}\n")
    script = """
import subprocess, sys
for _ in range(2):
    subprocess.run([sys.executable, "train.py"])
print("waits", flush=True)
input()
"""
    with started(tmp_path, script, **variables) as launcher:
        run = the_run(tmp_path)
        assert (run.state, run.info.pid, run.info.earlier) == ("running", launcher.pid, [])
        assert [death.started for death in deaths.find_in_run(run)] == ([] if end == "pass" else [False, False])
    run = the_run(tmp_path)
    assert run.state == "ended"
    assert run.info.command.endswith("train.py")


def test_a_launcher_that_ends_first_hands_its_run_over(tmp_path: Path) -> None:
    code = 'import autoprof, sys\nwith autoprof.step(1):\n    print("waits", flush=True)\n    sys.stdin.readline()\n'
    (tmp_path / "train.py").write_text(code)
    script = """
import subprocess, sys
trainer = subprocess.Popen([sys.executable, "train.py"], stdout=subprocess.PIPE)
trainer.stdout.readline()
trainer.returncode = 0
print("waits", flush=True)
"""
    with started(tmp_path, script) as launcher:
        launcher.wait(timeout=60)
        run = the_run(tmp_path)
        assert run.state == "running"
        assert run.info.pid not in (0, launcher.pid)
    assert the_run(tmp_path).info.state == "ended"
