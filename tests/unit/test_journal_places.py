"""Rules for the place where a process records, checked from outside: moved folders, full disks, equal pids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import judged_runs
from tests.support.judged_runs import WHOLE_STEP, Ended, Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# The folder disappears during the update of step 2. The program trains until the folder exists again, then for two more
# steps.
AWAY = """
import shutil
from small import *
run = os.path.join(os.environ["AUTOPROF_DIR"], os.environ["AUTOPROF_RUN_ID"])
trainer = Trainer()
def at(place):
    if (trainer.number, place) == (2, "in update"):
        {does}
trainer.fit(2, at)
{until}
trainer.number = 100
trainer.fit(2)
print(trainer.number)
"""
UNTIL = """
import time
deadline = time.monotonic() + 60
while not os.path.exists(run) and time.monotonic() < deadline:
    trainer.fit(1)
    time.sleep(0.01)
"""


class Away:
    """Run whose folder is moved away or removed during training."""

    def __init__(self, folder: Path, does: str, until: str) -> None:
        self.place = Place(folder)
        self.moved = self.place.folder / "moved"
        self.ended = self.place.ended(AWAY.format(does=does, until=until), AUTOPROF_LOOK_MS="200")


@pytest.fixture(
    scope="module", params=[("os.rename(run, 'moved')", UNTIL), ("shutil.rmtree(run)", "")], ids=["moved", "removed"]
)
def away(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Away:
    return Away(tmp_path_factory.mktemp("away"), *request.param)


@pytest.mark.fault("the run's folder is moved away or removed", "continues", "its files")
def test_a_program_whose_run_folder_disappears_ends_as_without_autoprof(away: Away) -> None:
    assert (away.ended.status, away.ended.stdout) == (0, "102\n")
    assert [line for line in away.ended.stderr.splitlines() if line not in away.ended.said] == []


@pytest.mark.parametrize("away", [("os.rename(run, 'moved')", UNTIL)], ids=["moved"], indirect=True)
def test_a_moved_folder_has_the_steps_from_before_the_move(away: Away) -> None:
    assert judged_runs.steps(away.moved)[:1] == [1]
    assert judged_runs.names(away.moved, 1) == WHOLE_STEP


def test_steps_after_the_folder_disappears_are_a_run_at_its_path(away: Away) -> None:
    assert {101, 102} <= set(judged_runs.steps(away.place.run))
    assert judged_runs.names(away.place.run, 102) == WHOLE_STEP
    assert judged_runs.problems(away.place.run) == []


def test_a_missing_folder_is_reported_in_one_line(away: Away) -> None:
    (line,) = away.ended.said
    assert str(away.place.run) in line


MOUNTS = ("-m",)
# The arguments are the Python command. The disk disappears with the namespace, so its files are copied first.
ON_A_SMALL_DISK = """
mount -t tmpfs -o size=$SIZE none "$AUTOPROF_DIR" || exit
"$@"
status=$?
cp -a "$AUTOPROF_DIR/." kept
exit $status
"""
namespaces = pytest.mark.skipif(not judged_runs.permitted(*MOUNTS), reason="needs root, to mount a disk")


class SmallDisk:
    """Run on a disk of the given size. Its files are copied to the folder `kept`."""

    def __init__(self, folder: Path, size: str, code: str) -> None:
        place = Place(folder)
        place.runs.mkdir()
        self.kept = folder / "kept"
        self.kept.mkdir()
        self.run = self.kept / judged_runs.RUN_ID
        before = ("unshare", *MOUNTS, "sh", "-c", ON_A_SMALL_DISK, "sh")
        self.ended: Ended = place.ended(code, before=before, SIZE=size)

    def files(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.kept)): path.read_bytes() for path in self.kept.rglob("*") if path.is_file()}


TRAINS = """
from small import *
trainer = Trainer()
trainer.fit(100)
print(trainer.number)
"""


@pytest.fixture(scope="module", params=["4k", "8k", "12k", "16k", "24k", "40k"])
def small_disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SmallDisk:
    return SmallDisk(tmp_path_factory.mktemp("small"), request.param, TRAINS)


@namespaces
@pytest.mark.fault("a disk with space for few files or steps", "continues", "steps that do not fit; files are complete")
def test_on_a_small_disk_the_program_ends_as_without_autoprof_and_files_are_complete(small_disk: SmallDisk) -> None:
    ended = small_disk.ended
    assert (ended.status, ended.stdout) == (0, "100\n")
    assert [line for line in ended.stderr.splitlines() if line not in ended.said] == []
    for name, content in small_disk.files().items():
        assert ".part" not in name
        assert len(content) < 2 or content.endswith(b"\n")
        if name.endswith(".json"):
            json.loads(content)
    report = judged_runs.asked("report", str(small_disk.run))
    steps = [step["number"] for step in report.get("steps", [])]
    assert steps == list(range(1, len(steps) + 1))
    assert [note for note in report.get("notes", []) if "left out" in note] == []


@namespaces
@pytest.mark.parametrize("small_disk", ["40k"], indirect=True)
def test_on_a_small_disk_the_first_steps_are_recorded(small_disk: SmallDisk) -> None:
    assert len(judged_runs.steps(small_disk.run)) > 1


@namespaces
def test_a_full_disk_is_reported_in_one_line(small_disk: SmallDisk) -> None:
    (line,) = small_disk.ended.said
    assert "No space left on device" in line


FILLED = """
from small import *
filler = os.path.join(os.environ["AUTOPROF_DIR"], "filler")
trainer = Trainer()
trainer.fit(2)
with open(filler, "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(1000))
    except OSError:
        pass
trainer.fit(50)
os.unlink(filler)
trainer.number = 100
trainer.fit(2)
print(trainer.number)
"""


@namespaces
@pytest.mark.fault("a disk is full for a while", "continues", "the steps of that time")
def test_a_run_is_recorded_again_once_the_disk_has_space(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path, "256k", FILLED)
    assert (disk.ended.status, disk.ended.stdout) == (0, "102\n")
    (line,) = disk.ended.said
    assert "No space left on device" in line
    steps = judged_runs.steps(disk.run)
    assert (steps[:2], steps[-2:]) == ([1, 2], [101, 102])
    assert judged_runs.names(disk.run, 102) == WHOLE_STEP
    assert judged_runs.opened(disk.run) == []
    (problem,) = judged_runs.problems(disk.run)
    assert "lines of the timeline were lost: No space left on device" in problem


HOSTS = ("-m", "-u")
ON_A_HOST = """
hostname $NAME && mount -t tmpfs none "$AUTOPROF_DIR" || exit
"$@" && cp -a "$AUTOPROF_DIR/." $NAME
"""
ONE_RANK = """
from small import *
def at(place):
    if (trainer.number, place) == (2, "in update"):
        print("there", flush=True)
        input()
trainer = Trainer()
trainer.fit(3, at)
"""


@pytest.mark.skipif(not judged_runs.permitted(*HOSTS), reason="needs root, for a host name and a disk")
def test_two_hosts_without_a_shared_disk_have_parts_that_form_one_run_when_copied(place: Place) -> None:
    place.runs.mkdir()
    started, parts = [], [place.folder / "n1", place.folder / "n2"]
    for rank, part in enumerate(parts):
        part.mkdir()
        before = ("unshare", *HOSTS, "sh", "-c", ON_A_HOST, "sh")
        started.append(place.start(ONE_RANK, before=before, NAME=part.name, RANK=str(rank), WORLD_SIZE="2"))
    assert [each.stdout.readline() for each in started] == ["there\n"] * 2
    assert [each.communicate("go on\n") for each in started] == [("", "")] * 2
    for rank, part in enumerate(parts):
        assert judged_runs.steps(part / judged_runs.RUN_ID) == [1, 2, 3]
        assert {span.rank for span in judged_runs.spans(part / judged_runs.RUN_ID, 3)} == {rank}
        assert judged_runs.problems(part / judged_runs.RUN_ID) == []
    shutil.copytree(parts[1], parts[0], dirs_exist_ok=True)
    both_are_in_each_step(parts[0] / judged_runs.RUN_ID)
    assert judged_runs.problems(parts[0] / judged_runs.RUN_ID) == []


def both_are_in_each_step(run: Path) -> None:
    """Assert that a report shows all spans of two ranks, with one file for each rank."""
    assert judged_runs.steps(run) == [1, 2, 3]
    for step in (1, 2, 3):
        shown = judged_runs.spans(run, step)
        # A lane also has spans of the steps before and after that overlap this one.
        expected = {(rank, name) for rank in (0, 1) for name in WHOLE_STEP}
        assert {(span.rank, span.name) for span in shown} == expected
        assert len({(span.rank, span.file) for span in shown}) == len({span.file for span in shown}) == 2


PIDS = ("--pid", "--fork", "--mount-proc")
pids = pytest.mark.skipif(not judged_runs.permitted(*PIDS), reason="needs root, for a namespace of pids")
# Each worker runs in a container with the host's name, in which its pid is 1. It waits in the update of step 2.
CONTAINERS = f"""
from small import *
if sys.argv[1:]:
    rank, end = sys.argv[1:]
    trainer = Trainer()
    def at(place):
        if (trainer.number, place) == (2, "in update"):
            print(rank, os.getpid(), flush=True)
            input()
            if end:
                os._exit(3)
    trainer.fit(3, at)
    sys.exit()

def start(rank, end=""):
    command = ["unshare", *{PIDS}, sys.executable, __file__, str(rank), end]
    variables = {{"RANK": str(rank), "WORLD_SIZE": "2"}}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | variables, stdin=pipe, stdout=pipe, text=True)

def there(worker):
    print(worker.stdout.readline(), end="", flush=True)

"""
TOGETHER = """
workers = [start(0), start(1)]
for worker in workers:
    there(worker)
input()
for worker in workers:
    worker.communicate("go on\\n")
print([worker.returncode for worker in workers])
"""
ONE_AFTER_THE_OTHER = """
for rank, end in ((0, "end"), (1, "")):
    worker = start(rank, end)
    there(worker)
    input()
    worker.communicate("go on\\n")
    print(worker.returncode, flush=True)
    input()
"""


class Together:
    """Run with two concurrent processes that have the same host name and pid.

    Attributes:
        during: Problems that doctor reports while both are in step 2.
    """

    def __init__(self, folder: Path) -> None:
        place = Place(folder)
        self.run = place.run
        started: Any = place.start(CONTAINERS + TOGETHER)
        assert [started.stdout.readline() for _ in range(2)] == ["0 1\n", "1 1\n"]
        self.during = judged_runs.problems(place.run)
        assert started.communicate("go on\n") == ("[0, 0]\n", "")


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Together:
    return Together(tmp_path_factory.mktemp("together"))


@pids
def test_two_processes_with_the_same_pid_are_both_in_the_report(together: Together) -> None:
    both_are_in_each_step(together.run)


@pids
def test_doctor_finds_no_problem_in_two_ended_processes_with_the_same_pid(together: Together) -> None:
    assert judged_runs.problems(together.run) == []
    assert judged_runs.opened(together.run) == []


@pids
def test_doctor_does_not_report_a_running_process_of_a_container_as_dead(together: Together) -> None:
    assert together.during == []


@pids
def test_a_process_with_the_pid_of_a_dead_one_has_its_own_spans(place: Place) -> None:
    started = place.start(CONTAINERS + ONE_AFTER_THE_OTHER)

    def proceed(line: str) -> list[str]:
        assert started.stdout.readline() == line
        found = judged_runs.problems(place.run)
        print("go on", file=started.stdin, flush=True)
        return found

    for line in ("0 1\n", "3\n", "1 1\n", "0\n"):
        found = proceed(line)
    # Doctor must not attribute the open stage of the first process to the second.
    assert [problem for problem in found if "rank 1" in problem] == []
    assert started.communicate() == ("", "")
    assert judged_runs.steps(place.run) == [1, 2, 3]
    later = judged_runs.spans(place.run, 3)
    assert sorted((span.rank, span.name) for span in later) == [(1, name) for name in WHOLE_STEP]


EXECUTED = """
from small import *
first = not sys.argv[1:]
trainer = Trainer(0 if first else 10)
def at(place):
    if first and (trainer.number, place) == (2, "in update"):
        os.execv(sys.executable, [sys.executable, __file__, "again"])
    if (trainer.number, place) == (12, "in generate"):
        print(os.getpid(), flush=True)
        input()
trainer.fit(3, at)
"""


@pytest.mark.fault("a program calls exec in a stage", "continues", "that stage")
@pytest.mark.parametrize("ends", [True, False], ids=["ends", "is killed"])
def test_spans_that_were_open_before_an_exec_are_not_open_after_it(place: Place, ends: bool) -> None:
    started = place.start(EXECUTED)
    assert started.stdout.readline() == f"{started.pid}\n"
    assert judged_runs.opened(place.run) == [("generate", 12), ("step", 12)]
    assert judged_runs.problems(place.run) == []
    if ends:
        assert started.communicate("go on\n") == ("", "")
        assert judged_runs.opened(place.run) == []
        assert judged_runs.problems(place.run) == []
    else:
        started.kill()
        started.communicate()
        (problem,) = judged_runs.problems(place.run)
        assert [name for name in (*judged_runs.STAGES, "step 2", "step 12") if name in problem] == [
            "generate",
            "step 12",
        ]
    assert judged_runs.steps(place.run) == ([1, 11, 12, 13] if ends else [1, 11])
    for step, names in ((1, WHOLE_STEP), (2, ["generate"]), (11, WHOLE_STEP)):
        assert judged_runs.names(place.run, step) == names
