"""Places and times of runs: unusual folders, changed clocks, concurrent and successive runs."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoprof.base import files
from autoprof.base.identity import HOST
from autoprof.capture import recorder
from autoprof.run import end
from autoprof.run.journal import Span
from autoprof.rundir import layout
from autoprof.rundir import runs as run_reader
from tests.support import helpers
from tests.support.captures import SUBJECT, finished, work
from tests.support.helpers import TOML, spans

TARGET = "class Trainer:\n    def step(self, value): return value\n"
RECIPE = """
target = "tiny"
hook = [{ name = "step", attribute = "Trainer.step", behaviour = "step.wrap", options = { number = "value" } }]
"""
CODE = "import tiny; print([tiny.Trainer().step(number) for number in (1, 2)])"


def start(folder: Path, code: str = CODE, cwd: Path | None = None, **variables: str) -> subprocess.Popen[str]:
    """Start a small run."""
    lib = folder / "lib"
    lib.mkdir(exist_ok=True)
    (lib / "tiny.py").write_text(TARGET)
    (lib / "tiny.toml").write_text(RECIPE)
    settings = {"AUTOPROF": "1", "AUTOPROF_RECIPES": str(lib / "tiny.toml"), "PYTHONPATH": str(lib)}
    return helpers.started([sys.executable, "-c", code], cwd=cwd or folder, **settings | variables)


def through(process: subprocess.Popen[str]) -> str:
    """Wait until a run has ended successfully, and return its stderr."""
    output, errors = process.communicate(timeout=100)
    assert (process.returncode, output) == (0, "[1, 2]\n"), errors
    return errors


@pytest.mark.fault("runs that begin at the same time", "continue", "nothing")
def test_runs_that_begin_at_the_same_time_have_their_own_folders(tmp_path: Path) -> None:
    for process in [start(tmp_path) for _ in range(3)]:
        through(process)
    runs = run_reader.runs(tmp_path / "autoprof_runs")
    assert [run.state for run in runs] == ["ended"] * 3
    assert (tmp_path / "autoprof_runs" / "latest").resolve().name in {run.id for run in runs}
    assert not list((tmp_path / "autoprof_runs").rglob("*.part"))


@pytest.mark.fault("a run is resumed in its directory", "continues", "nothing")
def test_a_resumed_run_keeps_its_files_and_lists_the_earlier_attempt(tmp_path: Path) -> None:
    through(start(tmp_path, AUTOPROF_RUN_ID="mine"))
    run = tmp_path / "autoprof_runs" / "mine"
    before = {path: path.read_bytes() for path in run.glob("journal/*")}
    assert through(start(tmp_path, AUTOPROF_RUN_ID="mine")) == ""
    assert all(path.read_bytes() == content for path, content in before.items())
    assert len(list(run.glob("journal/*"))) == 2
    info = json.loads((run / "run.json").read_text())
    assert info["state"] == "ended"
    assert [attempt["state"] for attempt in info["earlier"]] == ["ended"]
    assert info["earlier"][0]["pid"] != info["pid"]


# Program that counts file operations in the folder of runs until the last step has ended.
WATCH = """
import collections, os, pathlib, sys  # pathlib of 3.10 keeps the `os.stat` of its import
done = collections.Counter()
def note(event, path):
    if isinstance(path, (str, os.PathLike)) and "autoprof_runs" in str(path):
        done[event, os.path.dirname(os.path.relpath(path, "autoprof_runs"))] += 1
sys.addaudithook(lambda event, args: note(event, args[0]) if event in ("open", "os.listdir", "os.scandir") else None)
def noting(name, real):
    return lambda path, *args, **kwargs: (note(name, path), real(path, *args, **kwargs))[1]
from autoprof.base.originals import os as own
for each in (os, own):
    each.stat, each.lstat = noting("stat", each.stat), noting("stat", each.lstat)
"""


@pytest.mark.parametrize("run_id", ["old", "new"])
@pytest.mark.parametrize("state", ["running", "ended"])
def test_the_cost_of_a_run_does_not_grow_with_the_existing_files(tmp_path: Path, run_id: str, state: str) -> None:
    counted = []
    for count in (10, 1_000):
        place = tmp_path / f"{count}"
        step = place / "autoprof_runs" / "old" / "global_step_000002"
        step.mkdir(parents=True)
        for number in range(count // 2):
            for name in (f"x{number}.meta.json.part", f"x{number}.pt.trace.json.part"):
                (step / name).touch()
                # The end of a run waits for files that were written lately.
                os.utime(step / name, (1, 1))
        info = {"id": "old", "state": state, "host": HOST, "pid": 2**30}
        layout.write_json(step.parent / "run.json", info)
        (step.parent.parent / "latest").symlink_to("old")
        code = f"{WATCH}\n{CODE}; print(sorted(done.items()), file=sys.stderr)"
        lines = through(start(place, code, AUTOPROF_RUN_ID=run_id)).splitlines()
        counted += [line for line in lines if line.startswith("[(")]
    assert len(counted) == 2
    assert counted[0] == counted[1]
    assert f"('open', '{'latest' if run_id == 'new' else 'old'}')" in counted[0]
    assert "global_step" not in counted[0]


@pytest.mark.fault("a relative AUTOPROF_DIR, actors elsewhere", "continue", "nothing")
def test_a_relative_folder_is_relative_to_the_process_that_began_the_run(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    run = f"subprocess.check_output([sys.executable, '-c', {CODE!r}], text=True, cwd='elsewhere')"
    code = f"import subprocess, sys; print({run}, end='')"
    through(start(tmp_path, code, AUTOPROF_DIR="some/runs"))
    assert len(run_reader.runs(tmp_path / "some" / "runs")) == 1


@pytest.mark.fault("spaces, line ends, non-ASCII in paths", "continues", "nothing")
@pytest.mark.parametrize("name", ["with spaces", "数据 é", "new\nline", "100%s {x}", "-dash"])
def test_folders_with_unusual_names_work(tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    (place / "cwd").mkdir(parents=True)
    assert through(start(tmp_path, cwd=place / "cwd", AUTOPROF_DIR=str(place / "runs"), TMPDIR=str(place))) == ""
    (run,) = run_reader.runs(place / "runs")
    assert (run.state, run.info.cwd) == ("ended", str(place / "cwd"))


def test_a_run_works_in_a_locale_without_utf8(tmp_path: Path) -> None:
    through(start(tmp_path, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"))
    assert [run.state for run in run_reader.runs(tmp_path / "autoprof_runs")] == ["ended"]


@pytest.mark.fault("a path that the locale can't decode", "continues", "the profile; a warning on stderr")
def test_a_path_that_the_locale_can_not_decode_costs_only_the_profile(tmp_path: Path) -> None:
    (tmp_path / "é").mkdir()
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert through(start(tmp_path, cwd=tmp_path / "é", **locale)).count("\n") <= 1


@pytest.mark.fault("a folder of another user", "continues", "autoprof's files; a warning on stderr")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_folder_without_write_permission_costs_only_the_profile(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir(mode=0o755)
    for place in (tmp_path, *list(tmp_path.parents)[:3]):
        place.chmod(place.stat().st_mode | 0o055)
    # Import before the change of user, since other users may have no access to the modules.
    early = f"import os, autoprof.agent, autoprof.behaviours.steps, {TOML}, importlib.metadata"
    nobody = f"{early}\nos.setgid(65534); os.setuid(65534)\n"
    errors = through(start(tmp_path, nobody + CODE, AUTOPROF_DIR=str(tmp_path / "runs")))
    assert "can't write to" in errors or "(it is too long); it takes a folder" in errors
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.fixture
def deleted_mount(tmp_path: Path) -> Iterator[Path]:
    """Mount a folder, as containers do, and delete it at its source."""
    (tmp_path / "source").mkdir()
    (tmp_path / "mounted").mkdir()
    if subprocess.run(["mount", "--bind", tmp_path / "source", tmp_path / "mounted"], check=False).returncode:
        pytest.skip("needs the right to mount a disk")
    (tmp_path / "source").rmdir()
    yield tmp_path / "mounted"
    subprocess.run(["umount", "-l", tmp_path / "mounted"], check=True)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "mounted").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "ro", "none", tmp_path / "mounted"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a disk")
    yield tmp_path / "mounted"
    subprocess.run(["umount", "-l", tmp_path / "mounted"], check=True)


def assert_costs_only_the_profile(folder: Path, runs: str | Path, why: str = "can't write to") -> None:
    errors = through(start(folder, CODE, AUTOPROF_DIR=str(runs)))
    assert why in errors
    assert (errors.count("\n"), errors.count("autoprof:")) == (1, 1)


@pytest.mark.fault("AUTOPROF_DIR can't be made", "continues", "autoprof's files; a warning on stderr")
@pytest.mark.parametrize("place", ["/proc/x", "dangling/x", "loop/x", "file/x", f"{'x' * 300}", "/".join("x" * 2100)])
def test_a_folder_that_can_not_be_made_costs_only_the_profile(tmp_path: Path, place: str) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    long = {"why": "(it is too long); it takes a folder"} if len(place) > 255 else {}
    assert_costs_only_the_profile(tmp_path, tmp_path / place, **long)


@pytest.mark.fault("the source of a mounted AUTOPROF_DIR is gone", "continues", "autoprof's files; a warning on stderr")
def test_a_mounted_folder_with_a_deleted_source_costs_only_the_profile(tmp_path: Path, deleted_mount: Path) -> None:
    assert_costs_only_the_profile(tmp_path, deleted_mount)
    assert_costs_only_the_profile(tmp_path, deleted_mount / "runs")


@pytest.mark.fault("AUTOPROF_DIR is on a read-only disk", "continues", "autoprof's files; a warning on stderr")
def test_a_folder_on_a_read_only_disk_costs_only_the_profile(tmp_path: Path, read_only: Path) -> None:
    assert_costs_only_the_profile(tmp_path, read_only / "a" / "b")


def test_a_deep_folder_that_can_not_be_made_raises_the_error_of_the_disk() -> None:
    with pytest.raises(OSError, match="No such file"):
        files.folder("/proc/" + "x/" * 2000)


@pytest.mark.fault("the working directory was deleted", "continues", "the profile; a warning on stderr")
@pytest.mark.parametrize("runs", ["", "some/runs"])
def test_a_deleted_working_directory_costs_only_the_profile(tmp_path: Path, runs: str) -> None:
    run = f"subprocess.check_output([sys.executable, '-c', {CODE!r}], text=True)"
    on = {"AUTOPROF": "1", "AUTOPROF_DIR": runs}
    gone = "import os, subprocess, sys; os.mkdir('x'); os.chdir('x'); os.rmdir('../x')"
    code = f"{gone}; os.environ |= {on}; print({run}, end='')"
    errors = through(start(tmp_path, code, AUTOPROF="0"))
    assert errors.count("autoprof:") == 1


@pytest.mark.fault("the run directory is removed", "continues", "its files")
def test_a_folder_removed_during_the_run_costs_only_the_profile(tmp_path: Path) -> None:
    code = """
import os, shutil, tiny
print([tiny.Trainer().step(1), shutil.rmtree("autoprof_runs") or open("autoprof_runs", "w") and tiny.Trainer().step(2)])
"""
    assert "Traceback" not in through(start(tmp_path, code))


@pytest.mark.fault("the clock is set back", "continues without a wait", "nothing")
def test_autoprof_does_not_wait_for_files_from_before_the_clock_was_set_back(made: Any) -> None:
    run = made(stop_timeout_s=20.0)
    part = run.rundir.make(run.rundir.step(1)) / "x.pt.trace.json.part"
    part.touch()
    os.utime(part, (time.time() + 7200, time.time() + 7200))
    begun = time.monotonic()
    end.wait_for_files(run)
    assert time.monotonic() - begun < 10


# Name of a capture, with host and pid to fill in, and a pid that no process has.
CAPTURE, GONE_PID = "actor.update.rank0.{}.pid{}", 9_000_001


@pytest.mark.parametrize(
    ("name", "age_s", "locked", "waits"),
    [
        (CAPTURE.format(HOST, GONE_PID), 3, False, False),
        # A finisher may be about to start.
        (CAPTURE.format(HOST, GONE_PID), 1, False, True),
        (CAPTURE.format(HOST, GONE_PID), 3, True, True),
        (CAPTURE.format(HOST, os.getppid()), 3, False, True),
        (CAPTURE.format("elsewhere", GONE_PID), 3, False, True),
        (CAPTURE.format(HOST, os.getpid()), 3, False, True),
        # Written by an earlier program of this process, before os.exec.
        (CAPTURE.format(HOST, os.getpid()), 6, False, False),
    ],
    # Explicit ids, because the names contain pids, which differ between the worker processes of pytest.
    ids=["gone", "gone lately", "at work", "running", "elsewhere", "own", "earlier program"],
)
@pytest.mark.parametrize("ending", [".pt.trace.json", ".pt.trace.json.gz", ".pickle"])
def test_autoprof_does_not_wait_for_recordings_of_dead_processes(
    made: Any, mocker: Any, name: str, ending: str, age_s: float, locked: bool, waits: bool
) -> None:
    run = made(stop_timeout_s=20.0)
    folder = run.rundir.make(run.rundir.step(1))
    raw, part = (folder / f"{name}{each}.part" for each in (ending.removesuffix(".gz"), ending))
    run.began = time.time() - 5
    for path in (raw, part):
        path.touch()
        os.utime(path, (time.time() - age_s, time.time() - age_s))

    def removed(seconds: float) -> None:
        raw.unlink()
        part.unlink(missing_ok=True)

    slept = mocker.patch.object(end.time, "sleep", side_effect=removed)
    with raw.open() as file:
        if locked:
            fcntl.flock(file, fcntl.LOCK_EX)
        end.wait_for_files(run)
    assert slept.call_count == int(waits)


@pytest.mark.fault("the clock is set back in a capture", "continues", "nothing; the meta file has both clocks")
def test_only_the_meta_file_shows_that_the_clock_was_set_back(made: Any, mocker: Any) -> None:
    run = made()
    recording = recorder.begin(run, SUBJECT)
    span = Span(run.timeline, "stage", "x", step=2, role="actor", rank=3)
    work()
    now, now_ns = time.time, time.time_ns
    mocker.patch("autoprof.base.originals.time.time", side_effect=lambda: now() - 7200)
    mocker.patch("autoprof.base.originals.time.time_ns", side_effect=lambda: now_ns() - 7200 * 10**9)
    recording.stop()
    span.end()
    ((meta, trace),) = finished(run).values()
    assert meta["state"] == "complete"
    assert trace is not None
    clock = meta["clock"]
    assert clock["stop"]["unix_ns"] < clock["start"]["unix_ns"]
    assert clock["stop"]["monotonic_ns"] > clock["start"]["monotonic_ns"]
    (line,) = [line for line in spans(run.rundir.path) if line["kind"] == "stage"]
    assert 0 <= line["end_ns"] - line["start_ns"] < 600 * 10**9
    assert HOST in str(run.rundir.process_file("journal", ".jsonl"))


@pytest.mark.fault("a command line of 200 kB", "continues, and can start programs", "nothing")
def test_the_run_info_variable_is_small_even_for_a_long_command(tmp_path: Path) -> None:
    code = f"""
import os, subprocess
{CODE.replace("print", "found =")}
assert subprocess.run(["echo", "x"], capture_output=True).stdout == b"x\\n"
assert len(os.environ["AUTOPROF_RUN_INFO"]) < 8000
print(found)
"""
    process = start(tmp_path, code + "#" + "x" * 100_000)
    assert through(process) == ""
    lib = str(tmp_path / "lib")
    (tmp_path / "long.py").write_text(code)
    command = [sys.executable, "long.py", *(f"trainer.some_argument_{number}=1" for number in range(8000))]
    settings = {"AUTOPROF": "1", "AUTOPROF_RECIPES": f"{lib}/tiny.toml", "PYTHONPATH": lib}
    result = helpers.run(command, cwd=tmp_path, **settings)
    assert (result.returncode, result.stdout) == (0, "[1, 2]\n"), result.stderr
    runs = run_reader.runs(tmp_path / "autoprof_runs")
    commands = [json.loads(Path(run.path, "run.json").read_text())["command"] for run in runs]
    assert "trainer.some_argument_100=1" in max(commands, key=len)


def test_settings_too_large_for_the_environment_switch_autoprof_off(tmp_path: Path) -> None:
    (tmp_path / "autoprof.toml").write_text("\n".join(f'[role.r{number}]\nranks = "0"' for number in range(5000)))
    assert "can be handed to the processes of a run" in through(start(tmp_path))


@pytest.mark.parametrize("run_id", ["../x", "a/b", "..", "latest"])
def test_an_invalid_run_id_costs_only_the_profile(tmp_path: Path, run_id: str) -> None:
    errors = through(start(tmp_path, CODE, AUTOPROF_RUN_ID=run_id))
    assert "it takes a folder's name" in errors
    assert not list(tmp_path.rglob(".gitignore"))


def test_a_failed_end_without_a_message_is_reported_by_type(tmp_path: Path) -> None:
    """The summary of the processes fails, as with a large run and little memory."""
    code = "import tiny; from autoprof.rundir import processes\ndef summary(*_): raise MemoryError\n"
    errors = through(start(tmp_path, f"{code}processes.summary = summary\n{CODE}"))
    assert errors == "autoprof: the end of the run can't be written: MemoryError\n"
