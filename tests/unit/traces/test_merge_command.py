"""The command `autoprof merge`, and merges at the end of a run."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from autoprof.cli import open
from autoprof.cli.open import Server
from autoprof.config.settings import Settings
from autoprof.run import end
from autoprof.rundir import runs
from autoprof.rundir.file_names import is_merged
from autoprof.rundir.layout import RunDir
from autoprof.traces.merge import merge
from autoprof.traces.merge_step import merge_replicas
from autoprof.traces.rewrite import Input
from tests.support.helpers import ROOT, clean_environment, wait_for, wait_for_line
from tests.support.merges import DESCRIBED, capture, command, described, roles_in
from tests.support.traces import BASE_NS, kineto, load, process, save


def test_merge_makes_one_file_of_a_step(run: Path, tmp_path: Path) -> None:
    result = command(tmp_path, "merge", run.name, "--step", "2")
    assert (result.returncode, result.stderr) == (0, "")
    assert ": 5 traces, " in result.stdout
    made = RunDir(run).step(2) / "merged.pt.trace.json.gz"
    names = described(load(made)["traceEvents"], "process_name", "name")
    assert list(dict.fromkeys(names[pid] for pid in sorted(names))) == [
        "trainer rank0",
        "actor rank0",
        "rollout replica0 TP-0",
        "rollout replica0 TP-1",
        "rollout replica1 TP-0",
    ]
    (step, _) = runs.read(run).steps
    assert (len(step.captures), [each.name for each in step.merged], step.merged[0].state) == (
        5,
        ["merged"],
        "complete",
    )
    # Traces that are merged already are not merged again.
    assert ": 5 traces, " in command(tmp_path, "merge", run.name, "--step", "2").stdout


def shown(made: Path) -> list[tuple[str, str, set[str]]]:
    """The groups as a viewer shows them: name, labels and the names of their events."""
    events = load(made)["traceEvents"]
    names, labels, places = (
        described(events, f"process_{what}", field)
        for what, field in (("name", "name"), ("labels", "labels"), ("sort_index", "sort_index"))
    )
    content: dict[int, set[str]] = {}
    for event in events:
        if event["ph"] != "M":
            content.setdefault(event["pid"], set()).add(event["name"])
    assert content.keys() == names.keys() == labels.keys() == places.keys()
    return [(names[pid], labels[pid], content[pid]) for pid in sorted(names, key=lambda pid: places[pid])]


def test_a_process_is_one_group_with_its_captures_and_its_timeline(tmp_path: Path) -> None:
    """Actor and ref share a process, as in verl. Kineto describes two devices; only the first has events."""
    device = [
        {"ph": "M", "name": "process_labels", "pid": 0, "args": {"labels": "GPU 0"}},
        {"ph": "M", "name": "process_labels", "pid": 1, "args": {"labels": "GPU 1"}},
        {"ph": "X", "name": "kernel", "pid": 0, "tid": 7, "ts": 101, "dur": 1},
    ]
    run = tmp_path / "autoprof_runs" / "20261120-101010-aaaaaa"
    for rank, pid in ((0, 7), (1, 8)):
        for stage in ("actor.update_actor", "ref.compute_ref_log_prob"):
            content = kineto(process(pid, "ray::WorkerDict") + device)
            capture(run, 2, f"{stage}.rank{rank}.h.pid{pid}", content, rank=rank, pid=pid)
    capture(run, 2, "rollout.replica0.rank1.h.pid9", kineto(process(9, "VLLM::Worker")), replica=0, rank=1, pid=9)
    (run / "run.json").write_text(json.dumps({"id": run.name, "state": "ended"}))
    (run / "journal").mkdir()
    for pid, kind, role in (
        (5, "step", "trainer"),
        (7, "stage", "actor"),
        (7, "stage", "ref"),
        (9, "request", "rollout"),
    ):
        span = {"kind": kind, "name": f"{role} {kind}", "step": 2, "role": role, "rank": None}
        times = {"start_ns": BASE_NS + 10**6, "end_ns": BASE_NS + 2 * 10**6}
        with (run / "journal" / f"h-{pid}.jsonl").open("a") as file:
            file.write(json.dumps(span | times, separators=(",", ":")) + "\n")
    assert command(tmp_path, "merge", run.name).returncode == 0
    groups = shown(RunDir(run).step(2) / "merged.pt.trace.json.gz")
    assert [(name, labels) for name, labels, _ in groups] == [
        ("trainer", "on h, pid 5"),
        ("actor+ref rank0", "on h, pid 7"),
        ("actor+ref rank0 (GPU 0)", "on h, pid 7"),
        ("actor+ref rank1", "on h, pid 8"),
        ("actor+ref rank1 (GPU 0)", "on h, pid 8"),
        ("rollout replica0 rank1", "on h, pid 9"),
    ]
    content = {name: names for name, _, names in groups}
    assert content["actor+ref rank0 (GPU 0)"] == {"kernel"}
    # Kineto's own tracks are in the group of the process.
    assert {"actor stage", "ref stage", "aten::op0", "PyTorch Profiler (0)"} <= content["actor+ref rank0"]
    assert "rollout request" in content["rollout replica0 rank1"]


def test_merge_of_some_roles_into_a_file_of_ones_own(run: Path, tmp_path: Path) -> None:
    (RunDir(run).step(2) / "actor.update_actor.rank0.h.pid7_ascend_pt").mkdir()
    result = command(tmp_path, "merge", str(run), "--step", "2", "--role", "!rollout", "-o", "mine.json.gz")
    assert "mine.json.gz: 2 traces, " in result.stdout
    assert "not merged, no Chrome trace: actor.update_actor.rank0.h.pid7_ascend_pt" in result.stdout
    assert len(load(tmp_path / "mine.json.gz")["autoprof"]["merged"]) == 2
    assert runs.read(run).steps[0].merged == []


@pytest.mark.fault("a part of a step is merged", "makes a file of its own", "nothing: the whole step's stays")
def test_a_part_of_a_step_never_has_the_name_of_the_whole(run: Path, tmp_path: Path) -> None:
    folder = RunDir(run).step(2)
    whole = folder / "merged.pt.trace.json.gz"
    assert command(tmp_path, "merge", run.name, "--step", "2").returncode == 0
    content = whole.read_bytes()
    traces = sorted(str(path) for path in folder.glob("rollout.replica0.*.gz"))
    made = set()
    for part in (
        [run.name, "--step", "2", "--role", "actor"],
        [run.name, "--step", "2", "--role", "!actor"],
        [run.name, "--step", "2", "--role", "actor,rollout"],
        traces,
        traces[:1],
        [str(folder)],
    ):
        result = command(tmp_path, "merge", *part)
        assert (result.returncode, result.stderr) == (0, "")
        made.add(Path(result.stdout.split(": ")[0]).name)
        assert whole.read_bytes() == content, part
    assert len(made) == 6
    assert {f"merged.{roles}.pt.trace.json.gz" for roles in ("actor", "actor+rollout", "rollout+trainer")} < made
    other = ["merge", run.name, "--step", "4"]
    for asked in (["merge", run.name, "--step", "2", "--role", "actor"], ["merge", *traces], other):
        result = command(tmp_path, *asked, "-o", str(whole))
        assert (result.returncode, whole.read_bytes() == content) == (1, True)
        assert "this name is reserved for the trace of the whole step" in result.stderr
    # They are no captures, and not half written ones.
    (step, _) = runs.read(run).steps
    assert len(step.captures) == 5
    assert {each.state for each in step.merged} == {"complete"}


@pytest.mark.parametrize("by", ["an older autoprof", "hand"])
def test_what_is_served_as_the_step_is_all_of_it(run: Path, tmp_path: Path, by: str) -> None:
    """A part that was moved to the name of the whole step is not served as the whole."""
    folder = RunDir(run).step(2)
    part = command(tmp_path, "merge", run.name, "--step", "2", "--role", "actor").stdout.split(": ")[0]
    assert command(tmp_path, "merge", run.name, "--step", "2").returncode == 0
    whole = folder / "merged.pt.trace.json.gz"
    roles = roles_in(whole)
    whole.write_bytes(Path(part).read_bytes())
    if by != "hand":
        meta = folder / "merged.actor.meta.json"
        meta.rename(folder / "merged.meta.json")
    with Server(0) as server:
        open.fill(server, runs.read(run), 2)
        (served,) = [content.file for content in server.contents.values() if content.for_perfetto]
    assert served == whole
    assert roles_in(whole) == roles > {"actor"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("merge",), "several steps; choose with --step: 2,4"),
        (("merge", "--step", "3"), "has no step 3; there are 2, 4"),
        (("merge", "--step", "4", "--role", "critic"), "no trace of critic in step 4; captured roles: actor"),
        (("merge", "--step", "4", "-o", "/nowhere/x.gz"), "No such file or directory: '/nowhere/x.gz'\n"),
        (("merge", "--step", "4", "-o", "x.tar"), "x.tar: autoprof merge writes *.pt.trace.json.gz; "),
        (("merge", "2025"), "no run matches '2025'"),
    ],
)
def test_what_can_not_be_merged_is_one_line(run: Path, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    (run.parent / "latest").symlink_to(run.name)
    result = command(tmp_path, *arguments)
    assert result.returncode == 1
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_step_with_a_broken_trace_names_it(run: Path, tmp_path: Path) -> None:
    capture(run, 4, "ref.x.rank0.h.pid7", b"hello")
    cut = kineto(process(5, "p", count=300))
    capture(run, 4, "ref.y.rank0.h.pid5", cut[: len(cut) // 2])
    result = command(tmp_path, "merge", run.name, "--step", "4")
    assert result.returncode == 0
    assert ": 2 traces, " in result.stdout
    assert re.search(r"left out: .*ref\.x\.rank0\.h\.pid7\.pt\.trace\.json\.gz: not a Chrome trace", result.stdout)
    assert (
        "truncated, merged up to its end: ref.y.rank0.h.pid5.pt.trace.json.gz: it ends in the middle" in result.stdout
    )
    (found,) = runs.read(run).steps[1].merged
    assert list(found.merged.left_out) == ["ref.x.rank0.h.pid7.pt.trace.json.gz"]
    assert list(found.merged.cut) == ["ref.y.rank0.h.pid5.pt.trace.json.gz"]
    # Without any readable trace, the reason is the error.
    for path in RunDir(run).step(4).glob("*.gz"):
        save(path, b"hello")
    result = command(tmp_path, "merge", run.name, "--step", "4")
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)


def test_each_replica_of_several_traces_gets_one(run: Path) -> None:
    merge_replicas(run)
    step = runs.read(run).steps[0]
    (found,) = step.merged
    assert (found.name, found.state, found.merged.replica) == ("rollout.replica0.merged", "complete", 0)
    ranks = [f"rollout.replica0.TP-{rank}.h.pid9.pt.trace.json.gz" for rank in (0, 1)]
    assert found.merged.merged == ranks
    assert len(step.captures) == 5
    made = RunDir(run).step(2) / "rollout.replica0.merged.pt.trace.json.gz"
    assert found.merged.bytes == made.stat().st_size
    before = made.stat().st_mtime_ns
    merge_replicas(run)
    assert made.stat().st_mtime_ns == before
    # A trace that came later, of which nothing can be had.
    capture(run, 2, "rollout.replica0.TP-2.h.pid9", b"hello", replica=0, rank=2)
    merge_replicas(run)
    (found,) = runs.read(run).steps[0].merged
    assert found.state == "complete"
    assert "TP-2" in str(found.merged.left_out)
    assert found.merged.merged == ranks
    for rank in range(3):
        capture(run, 2, f"rollout.replica0.TP-{rank}.h.pid9", b"hello", replica=0, rank=rank)
    capture(run, 2, "rollout.replica0.TP-3.h.pid9", b"hello", replica=0, rank=3)
    merge_replicas(run)
    (found,) = runs.read(run).steps[0].merged
    assert found.state == "failed"
    assert "TP-0" in found.merged.reason


def test_names_of_merged_files() -> None:
    assert is_merged("merged")
    assert is_merged("rollout.replica10.merged")
    assert not is_merged("rollout.replica0.TP-0.merged.pid7")
    assert not is_merged("actor.merged.rank0.h.pid7")
    assert is_merged("merged.actor+ref")
    assert not is_merged("merged.x.rank0.h.pid7")


@pytest.mark.parametrize("contents", ['("merge-profiles",)', "()"])
def test_the_users_command_comes_after_the_merge(run: Path, tmp_path: Path, contents: str) -> None:
    """As at the end of a run: the merging process is not a child of the process that ends."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from types import SimpleNamespace
from autoprof.run import end
from autoprof.rundir.layout import RunDir
from autoprof.config.settings import Settings
command = 'ls $AUTOPROF_RUN_DIR/global_step_000002 > said.part; mv said.part said'
settings = Settings(contents={contents}, on_finish=command)
run = SimpleNamespace(settings=settings, rundir=RunDir(Path({str(run)!r})), first_to_finish=None)
end._work_after_run(run)
end._work_after_run(run)
"""
    # Not through a pipe that the user's command would hold open.
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=clean_environment(), timeout=120, check=True)
    said = wait_for(tmp_path / "said")
    assert ("rollout.replica0.merged.meta.json" in said) == bool(contents != "()")


def test_the_users_command_is_run_though_the_merge_can_not_begin(
    run: Path, tmp_path: Path, mocker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ncat > /dev/null; exit 7\n")
    python.chmod(0o755)
    mocker.patch("autoprof.base.interpreter.find", return_value=str(python))
    command = f"echo > {tmp_path / 'said'} done"
    settings = Settings(contents=("merge-profiles",), on_finish=command)
    end._work_after_run(mocker.Mock(settings=settings, rundir=RunDir(run), info=mocker.Mock(id="x")))
    assert "the process that merges and copies traces ended with status 7" in caplog.text
    assert wait_for_line(tmp_path / "said") == "done\n"


def test_the_last_window_is_enough_for_a_merge(run: Path, mocker: Any) -> None:
    done = mocker.patch.object(end, "_work_after_run")
    mocker.patch.object(end, "wait_for_files")
    for contents, times in ((("cpu",), 0), (("merge-profiles",), 1)):
        made = mocker.Mock(settings=Settings(contents=contents), rundir=RunDir(run))
        end.window_passed(made)
        for thread in threading.enumerate():
            if thread.name == "autoprof-after":
                thread.join(10)
        assert done.call_count == times


def test_a_merge_that_is_going_on_holds_no_run_up(run: Path) -> None:
    folder = RunDir(run).step(2)
    (folder / ".merge-x.part").mkdir()
    (folder / "actor.x.rank0.h.pid1.pt.trace.json.part").touch()
    assert [path.name for path in RunDir(run).parts()] == ["actor.x.rank0.h.pid1.pt.trace.json.part"]
    assert {capture.name for capture in runs.read(run).steps[0].merged} == set()


# Traces written by torch itself.


def test_traces_that_torch_wrote(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    paths = []
    for rank in range(2):
        x = torch.randn(4, 4, requires_grad=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as profile:
            (x @ x).tanh().sum().backward()
        paths.append(tmp_path / f"{rank}.json{'.gz' * rank}")
        profile.export_chrome_trace(str(paths[-1]))
    assert os.getpid() in {event["pid"] for event in json.loads(paths[0].read_bytes())["traceEvents"]}
    merge([Input(path=path, label=path.name) for path in paths], tmp_path / "out.gz")
    after = load(tmp_path / "out.gz")["traceEvents"]

    def kinds(content: bytes) -> Counter[tuple[Any, ...]]:
        """The events with their times to the nanosecond, which floats since Kineto's base don't hold."""
        whole = json.loads(content, parse_float=Decimal)
        return Counter(
            (
                *(event["ph"], event["name"], event.get("dur"), json.dumps(event.get("args"), default=str)),
                whole["baseTimeNanoseconds"] + event["ts"] * 1000 if "ts" in event else None,
            )
            for event in whole["traceEvents"]
            if event["name"] not in DESCRIBED
        )

    before = [paths[0].read_bytes(), gzip.decompress(paths[1].read_bytes())]
    assert kinds(gzip.decompress((tmp_path / "out.gz").read_bytes())) == kinds(before[0]) + kinds(before[1])
    flows = [[event for event in after if event["ph"] == phase] for phase in "sf"]
    assert len(flows[0]) == len(flows[1]) > 0
    assert len({event["id"] for event in flows[0]}) == len(flows[0])
    assert {event["id"]: event["pid"] for event in flows[0]} == {event["id"]: event["pid"] for event in flows[1]}
