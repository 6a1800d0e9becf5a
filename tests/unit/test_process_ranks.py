"""Ranks of `srun`, `mpirun` and torchrun on several nodes, restarted ones too: all ranks of a launch are one run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autoprof.base import identity
from autoprof.rundir import runs
from autoprof.rundir.runs import Run
from tests.support.helpers import processes_of
from tests.support.launchers import by_hand, environment, mpirun, prepare, srun, together
from tests.support.servers import free_port
from tests.support.small_trainer import TRAINER, metas, torchrun

TRAIN = "from small import *\nTrainer().fit()\nprint(os.environ['AUTOPROF_RUN_ID'])\n"
# Program whose ranks meet at an address, as in a real trainer.
MEET = """
from small import *
import torch.distributed as dist

dist.init_process_group("gloo")
Trainer().fit()
dist.barrier()
print(os.environ["AUTOPROF_RUN_ID"])
dist.destroy_process_group()
"""


def left(folder: Path) -> list[Run]:
    found = runs.runs(folder / "autoprof_runs")
    assert {run.state for run in found} == {"ended"}
    return found


def trained(run: Run) -> list[int]:
    """Return the ranks of the processes that made step 2."""
    lines = [json.loads(line) for path in Path(run.path, "journal").glob("*.jsonl") for line in path.open()]
    return sorted(line["rank"] for line in lines if line["kind"] == "step" and line["step"] == 2)


def captured(run: Run) -> list[int]:
    return sorted(capture.meta.rank for capture in run.captures)


@pytest.mark.parametrize("kind", [srun, mpirun])
def test_ranks_are_one_run_and_their_files_have_their_ranks(tmp_path: Path, kind) -> None:
    prepare(tmp_path, TRAIN, TRAINER)
    done = together(tmp_path, [kind(rank, 2) for rank in range(2)], captured=True)
    (run,) = left(tmp_path)
    assert {result.stdout.strip() for result in done} == {run.id}
    assert captured(run) == [0, 1]
    assert [".rank0." in run.captures[0].name, ".rank1." in run.captures[1].name] == [True, True]
    assert len(list(Path(run.path, "journal").iterdir())) == 2
    assert (run.info.recipes, run.info.hosts) == (["small"], [identity.HOST])
    assert not any("autoprof:" in result.stderr for result in done)


def test_concurrent_steps_and_a_requeued_job_are_separate_runs(tmp_path: Path) -> None:
    prepare(tmp_path, TRAIN)
    again = {"SLURM_RESTART_COUNT": "1"}
    together(tmp_path, [srun(0, 2), srun(1, 2), srun(0, 2, step=1), srun(0, 2) | again])
    found = left(tmp_path)
    assert sorted(map(trained, found)) == [[0], [0], [0, 1]]


def test_a_program_that_each_rank_runs_twice_is_two_runs(tmp_path: Path) -> None:
    prepare(tmp_path, TRAIN)
    for _ in range(2):
        together(tmp_path, [srun(rank, 2) for rank in range(2)])
    first, second = left(tmp_path)
    assert [trained(first), trained(second)] == [[0, 1], [0, 1]]
    assert second.id == f"{first.id}-2"


def test_ranks_that_start_autoprof_themselves_are_one_run_each_time(tmp_path: Path) -> None:
    script = "import autoprof\nfor _ in range(2):\n    autoprof.start()\n    from small import *\n    Trainer().fit()\n"
    prepare(tmp_path, f"{script}    autoprof.stop()\n")
    together(tmp_path, [srun(rank, 2) | {"AUTOPROF": ""} for rank in range(2)])
    assert [trained(run) for run in left(tmp_path)] == [[0, 1], [0, 1]]


def test_children_of_a_rank_are_in_its_run(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'from small import *; Trainer().fit()'])\n"
    prepare(tmp_path, f"{child}{TRAIN}")
    together(tmp_path, [srun(1, 2)])
    (run,) = left(tmp_path)
    assert trained(run) == [1, 1]


def test_a_given_id_is_used_by_all_ranks_and_by_the_next_job(tmp_path: Path) -> None:
    prepare(tmp_path, TRAIN)
    for job in (12, 13):
        together(tmp_path, [srun(rank, 2, job=job) | {"AUTOPROF_RUN_ID": "mine"} for rank in range(2)])
    (run,) = left(tmp_path)
    assert (run.id, trained(run)) == ("mine", [0, 0, 1, 1])
    assert [attempt.state for attempt in run.info.earlier] == ["ended"]


def test_the_run_has_failed_if_one_rank_has_failed(tmp_path: Path) -> None:
    fails = "open('failed', 'w').close()\n    raise ValueError"
    waits = "while not os.path.exists('failed'): time.sleep(0.05)\n"
    prepare(
        tmp_path, f"from small import *\nTrainer().fit()\nif os.environ['SLURM_PROCID'] == '0':\n    {fails}\n{waits}"
    )
    with pytest.raises(AssertionError, match="ValueError"):
        together(tmp_path, [srun(0, 2), srun(1, 2)][:1])
    (run,) = runs.runs(tmp_path / "autoprof_runs")
    assert (run.state, run.info.error) == ("failed", "ValueError")
    together(tmp_path, [srun(1, 2)])
    (run,) = runs.runs(tmp_path / "autoprof_runs")
    assert trained(run) == [0, 1]


def test_ranks_that_meet_at_an_address_are_one_run_for_each_job(tmp_path: Path) -> None:
    prepare(tmp_path, TRAIN)
    port = free_port()
    for _ in range(2):
        together(tmp_path, [by_hand(rank, 2, port) for rank in range(2)])
    assert [trained(run) for run in left(tmp_path)] == [[0, 1], [0, 1]]


@pytest.mark.needs("torch")
def test_agents_of_torchrun_on_two_nodes_agree_on_one_run(tmp_path: Path) -> None:
    prepare(tmp_path, MEET)
    port = free_port()
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
    agent = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *rendezvous, "train.py"]
    done = together(tmp_path, [{}, {}], agent, captured=True)
    (run,) = left(tmp_path)
    assert [result.stdout.strip() for result in done] == [run.id, run.id]
    assert captured(run) == [0, 1]
    assert "torch.distributed.run" in run.info.command


@pytest.mark.needs("torch")
@pytest.mark.usefixtures("thorough")
def test_a_node_makes_its_own_run_if_the_first_node_has_no_autoprof(tmp_path: Path) -> None:
    prepare(tmp_path, MEET.replace('print(os.environ["AUTOPROF_RUN_ID"])', ""))
    port = free_port()
    static = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=localhost", f"--master-port={port}"]
    command = [sys.executable, "-m", "torch.distributed.run", *static]
    first = subprocess.Popen(
        [*command, "--node-rank=0", "train.py"], cwd=tmp_path, env=environment(tmp_path, AUTOPROF="0")
    )
    try:
        (second,) = together(tmp_path, [{}], [*command[1:], "--node-rank=1", "train.py"])
        assert first.wait(300) == 0
    finally:
        first.kill()
    assert "the first node of torchrun did not name a run" in second.stderr
    (run,) = left(tmp_path)
    assert trained(run) == [1]


def test_a_wrong_setting_does_not_stop_the_program(tmp_path: Path) -> None:
    prepare(tmp_path, "from small import *\nTrainer().fit()\nprint('done')\n")
    variables = [srun(rank, 2) | {"AUTOPROF_STEPS": "x"} for rank in range(2)]
    assert [result.stdout for result in together(tmp_path, variables)] == ["done\n", "done\n"]
    assert not (tmp_path / "autoprof_runs").exists()


def test_the_group_can_read_the_files_of_ranks(tmp_path: Path) -> None:
    prepare(tmp_path, TRAIN)
    together(tmp_path, [srun(0, 2) | {"AUTOPROF_ACCESS": "group"}])
    (run,) = left(tmp_path)
    made = [Path(run.path), *Path(run.path, "ranks").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made} == {0o750, 0o640}


def test_ranks_that_import_no_target_are_one_run(tmp_path: Path) -> None:
    prepare(tmp_path, "print('done')\n")
    zero, one = together(tmp_path, [srun(rank, 2) for rank in range(2)])
    # One rank reports it for all.
    assert ("no hook was applied" in zero.stderr, one.stderr) == (True, "")
    (run,) = left(tmp_path)
    assert "train.py did not import small" in run.info.no_hooks


def test_a_folder_that_cannot_be_written_does_not_stop_the_program(tmp_path: Path) -> None:
    prepare(tmp_path, "from small import *\nTrainer().fit()\nprint('done')\n")
    (tmp_path / "file").touch()
    done = together(tmp_path, [srun(rank, 2) | {"AUTOPROF_DIR": "file"} for rank in range(2)])
    assert [result.stdout for result in done] == ["done\n", "done\n"]


SCRIPT = """
from small import *

def inside():
    # In the first attempt, rank 1 dies during the window, once rank 0 is in it too.
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if os.environ["RANK"] == "1":
            while not os.path.exists("there"):
                time.sleep(0.02)
            os._exit(1)
        open("there", "w").close()
        time.sleep(60)  # until torchrun ends it

Trainer().fit(inside)
"""


@pytest.mark.fault("torchrun restarts ranks", "continues", "the capture of the dead rank")
def test_restarted_ranks_overwrite_nothing(tmp_path: Path) -> None:
    run = torchrun(tmp_path, SCRIPT, "--max-restarts", "1", AUTOPROF_STEPS="2")
    assert run.info.pid in {process["parent"] for process in processes_of(Path(run.path))}
    # In the first attempt, both ranks end during the window, so their captures stay unfinished.
    assert sorted((capture.state, capture.name.split(".")[2]) for capture in run.captures) == [
        ("complete", "rank0"),
        ("complete", "rank1"),
        ("unfinished", "rank0"),
        ("unfinished", "rank1"),
    ]
    assert len({capture.name.rpartition("pid")[2] for capture in run.captures}) == 4
    assert {meta["state"] for meta in metas(tmp_path)} == {"complete"}
