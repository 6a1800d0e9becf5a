"""The command line, as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, clean_environment

from autoprof import variables

Autoprof = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def autoprof(tmp_path: Path) -> Autoprof:
    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "autoprof", *arguments],
            cwd=tmp_path,
            env=clean_environment(**variables),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def make_run(parent: Path, name: str, *, state: str = "ended", pid: int = 1, steps: str = "2,4") -> Path:
    """A run directory with one complete, one failed and one unfinished capture in step 2."""
    folder = parent / name
    step = folder / "global_step_000002"
    step.mkdir(parents=True)
    info = {"id": name, "started": 1795200824.3, "state": state, "host": os.uname().nodename, "pid": pid}
    (folder / "run.json").write_text(json.dumps(info | {"settings": {"steps": steps}}))
    (step / "actor.a.rank0.h.pid1.pt.trace.json.gz").write_bytes(b"x" * 2000)
    (step / "actor.a.rank0.h.pid1.meta.json").write_text(json.dumps({"state": "complete"}))
    (step / "actor.b.rank0.h.pid1.meta.json").write_text(json.dumps({"state": "failed", "reason": "disk full"}))
    (step / "actor.c.rank0.h.pid1.pt.trace.json.part").write_bytes(b"x")
    (folder / "timeline").mkdir()
    spans = [{"kind": "step", "step": number, "start_ns": number, "end_ns": number} for number in (1, 2, 3, 4)]
    (folder / "timeline" / "h-1.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans))
    (folder / "hooks").mkdir()
    hook = {"module": "m", "attribute": "a", "behaviour": "stage", "state": "applied", "reason": "", "called": 1.0}
    process = {
        "host": "h",
        "pid": 1,
        "process": "ray::WorkerDict",
        "versions": {"verl": "0.9.1"},
        "hooks": {"verl/a": hook, "verl/b": hook | {"state": "failed", "reason": "TypeError: x", "called": None}},
        "errors": {"verl/a": {"count": 2, "last": "OSError: full"}},
    }
    (folder / "hooks" / "h-1.json").write_text(json.dumps(process))
    return folder


def test_ls_lists_runs_and_the_captures_of_one(autoprof: Autoprof, tmp_path: Path) -> None:
    make_run(tmp_path / "autoprof_runs", "20261120-101010-aaaaaa")
    make_run(tmp_path / "autoprof_runs", "20261120-111111-bbbbbb", state="running", pid=os.getpid())
    make_run(tmp_path / "autoprof_runs", "20261120-121212-cccccc", state="running", pid=2**22 + 1)
    listed = autoprof("ls")
    assert listed.returncode == 0
    rows = [line.split() for line in listed.stdout.splitlines()]
    assert [(row[0][-6:], row[3], row[5]) for row in rows[1:]] == [
        ("aaaaaa", "ended", "3"),
        ("bbbbbb", "running", "3"),
        ("cccccc", "unfinished", "3"),
    ]
    one = autoprof("ls", "20261120-10")
    assert one.returncode == 0
    states = {line.split()[1]: line.split()[2:] for line in one.stdout.splitlines() if line.startswith("2 ")}
    assert states == {
        "actor.a.rank0.h.pid1": ["complete", "2.0", "kB"],
        "actor.b.rank0.h.pid1": ["failed", "0", "B"],
        "actor.c.rank0.h.pid1": ["unfinished", "0", "B"],
    }


def test_ls_as_json(autoprof: Autoprof, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "elsewhere", "20261120-101010-aaaaaa")
    (run,) = json.loads(autoprof("ls", str(folder), "--json").stdout)
    assert run["id"] == folder.name
    assert [capture["state"] for capture in run["steps"][0]["captures"]] == ["complete", "failed", "unfinished"]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ((), 2, "arguments are required: COMMAND"),
        (("sing",), 2, "invalid choice"),
        (("ls",), 1, "there is no folder"),
        (("ls", "latest"), 1, "there is no folder"),
        (("ls", "--dir", "."), 1, "there are no runs in ."),
        (("ls", "x", "--dir", "."), 1, "no run matches 'x' in .; there are none"),
        (("run",), 2, "there is no command"),
        (("run", "--steps", "5:2", "--", "true"), 2, "AUTOPROF_STEPS: got '5:2'"),
        (("run", "--", "/nowhere/command"), 1, "/nowhere/command: No such file"),
        (("doctor", "latest"), 1, "there is no folder"),
    ],
)
def test_wrong_use_is_one_line(autoprof: Autoprof, arguments: tuple[str, ...], status: int, said: str) -> None:
    result = autoprof(*arguments)
    assert result.returncode == status
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_several_runs_that_match(autoprof: Autoprof, tmp_path: Path) -> None:
    for name in ("20261120-101010-aaaaaa", "20261120-111111-bbbbbb"):
        make_run(tmp_path / "autoprof_runs", name)
    result = autoprof("ls", "20261120")
    assert result.returncode == 1
    assert "several runs match '20261120'" in result.stderr


def test_run_sets_the_environment_and_keeps_the_exit_status(autoprof: Autoprof) -> None:
    show = (
        "import os, sys; print(os.environ['AUTOPROF'], os.environ['AUTOPROF_STEPS'], 'autoprof._boot' in sys.modules)"
    )
    result = autoprof("run", "--steps", "5:7", "--", sys.executable, "-c", f"{show}; sys.exit(7)")
    assert result.returncode == 7
    assert result.stdout.split() == ["1", "5:7", "True"]


def test_run_activates_without_an_installation(tmp_path: Path) -> None:
    # -S in front: no site-packages, so neither .pth nor the installed package; only what `autoprof run` sets up.
    code = "import sys; sys.path.insert(0, sys.argv[1]); from autoprof.cli import main; main(sys.argv[2:])"
    show = (
        "import os, sys; print(os.environ['PYTHONPATH']); import sitecustomize; print('autoprof._boot' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(ROOT), "run", "--", sys.executable, "-S", "-c", show]
    result = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=True)
    assert result.stdout.split() == [str(ROOT / "sitecustomize"), "True"]


def test_doctor_says_what_is_wrong_with_a_run(autoprof: Autoprof, tmp_path: Path) -> None:
    make_run(tmp_path / "autoprof_runs", "20261120-101010-aaaaaa")
    result = autoprof("doctor", "20261120-101010-aaaaaa")
    assert result.returncode == 1
    for text in (
        "ray::WorkerDict (1): verl/a: OSError: full",
        "hook verl/b: TypeError: x",
        "step 4 was asked for and executed, but has no folder",
        "actor.b.rank0.h.pid1: failed, disk full",
        "actor.c.rank0.h.pid1: unfinished, its process was ended",
    ):
        assert text in result.stdout


def test_doctor_says_that_no_step_matched(autoprof: Autoprof, tmp_path: Path) -> None:
    make_run(tmp_path / "autoprof_runs", "20261120-101010-aaaaaa", steps="100")
    result = autoprof("doctor", "20261120-101010-aaaaaa", "--json")
    assert result.returncode == 1
    problems = json.loads(result.stdout)["problems"]
    assert "the run executed none of the steps that AUTOPROF_STEPS asked for" in problems


@pytest.fixture
def made_up_target(tmp_path: Path) -> dict[str, str]:
    """A target of one module, with a recipe of a hook that applies and one that does not."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "madeup.py").write_text("def here(): pass\n")
    hooks = "".join(
        f'[[hook]]\nname = "{name}"\nmodule = "madeup"\nattribute = "{name}"\nbehaviour = "span"\n'
        f'options = {{ stage = "s", role = "r" }}\n'
        for name in ("here", "gone")
    )
    (tmp_path / "madeup.toml").write_text(f'target = "madeup"\ndistributions = ["pluggy"]\n{hooks}')
    return {"PYTHONPATH": str(tmp_path / "lib"), "AUTOPROF_RECIPES": str(tmp_path / "madeup.toml")}


def test_doctor_of_the_environment(autoprof: Autoprof, made_up_target: dict[str, str], tmp_path: Path) -> None:
    variables: dict[str, Any] = made_up_target | {"NVTX_INJECTION64_PATH": "/usr/lib/libcupti.so"}
    variables["AUTOPROF_KEEP_NVTX_INJECTION"] = "1"
    result = autoprof("doctor", "--json", AUTOPROF_DISABLE="verl,vllm,ray", **variables)
    report = json.loads(result.stdout)
    hooks = {hook: (state, reason) for hook, state, reason in report["hooks"]}
    assert hooks["madeup/here"] == ("applied", "")
    assert hooks["madeup/gone"] == ("skipped", "madeup has no gone")
    assert hooks["ray/init"] == ("skipped", "AUTOPROF_DISABLE names it")
    assert "activation" in report["facts"]
    assert any("NVTX_INJECTION64_PATH" in problem for problem in report["problems"])
    assert result.returncode == 1
    assert not (tmp_path / "autoprof_runs").exists()


def test_doctor_says_what_is_newer_than_its_recipe(
    autoprof: Autoprof, made_up_target: dict[str, str], tmp_path: Path
) -> None:
    path = Path(made_up_target["AUTOPROF_RECIPES"])
    path.write_text('versions = ">=0.0.1,<0.1"\n' + path.read_text())
    report = json.loads(autoprof("doctor", "--json", AUTOPROF_DISABLE="verl,vllm,ray", **made_up_target).stdout)
    version = report["facts"]["madeup"]
    said = (
        f"madeup {version} is newer than what its recipe was made for (>=0.0.1,<0.1); its hooks are tried all the same"
    )
    assert said in report["notes"]
    hooks = {hook: (state, reason) for hook, state, reason in report["hooks"]}
    assert hooks["madeup/here"] == ("applied", f"{version} is outside the recipe's range >=0.0.1,<0.1")

    folder = make_run(tmp_path / "autoprof_runs", "20261120-101010-aaaaaa")
    assert "newer than" not in autoprof("doctor", folder.name).stdout
    process = folder / "hooks" / "h-1.json"
    process.write_text(process.read_text().replace('"0.9.1"', '"99.0"'))
    assert "verl 99.0 is newer than what its recipe was made for" in autoprof("doctor", folder.name).stdout


def test_doctor_names_variables_that_this_vllm_does_not_read(autoprof: Autoprof) -> None:
    names = {"VLLM_TORCH_PROFILER_DIR": "/x", "VLLM_PROFILER_MAX_ITERS": "3", "VLLM_CPU_KVCACHE_SPACE": "1"}
    report = json.loads(autoprof("doctor", "--json", AUTOPROF_DISABLE="verl,ray", **names).stdout)
    notes = [note for note in report["notes"] if note.startswith("VLLM_")]
    assert notes == [
        "VLLM_TORCH_PROFILER_DIR is set, but vLLM 0.27.1 does not read it (<0.16 do); autoprof does not need it",
        "VLLM_PROFILER_MAX_ITERS is set, but vLLM 0.27.1 does not read it (>=0.12,<0.16 do); autoprof does not need it",
    ]


@pytest.mark.parametrize(
    ("version", "unread"),
    [
        ("0.9.2", {"VLLM_TORCH_CUDA_PROFILE", "VLLM_TORCH_PROFILER_WITH_STACK", "VLLM_PROFILER_MAX_ITERS"}),
        ("0.10.2", {"VLLM_TORCH_CUDA_PROFILE", "VLLM_PROFILER_MAX_ITERS"}),
        ("0.11.2", {"VLLM_PROFILER_MAX_ITERS"}),
        ("0.12.0", set()),
        ("0.15.1+cpu", set()),
        ("0.16.0", "all"),
        ("0.33.0", "all"),
        ("", set()),
    ],
)
def test_what_each_vllm_reads(version: str, unread: set[str] | str) -> None:
    kinds = {
        "VLLM_TORCH_PROFILER_DIR",
        "VLLM_TORCH_CUDA_PROFILE",
        "VLLM_TORCH_PROFILER_WITH_STACK",
        "VLLM_PROFILER_MAX_ITERS",
    }
    said = {line.partition(" ")[0] for line in variables.unread({*kinds, "VLLM_X"}, version)}
    assert said == (kinds if unread == "all" else unread)


def test_doctor_refuses_a_wrong_setting(autoprof: Autoprof) -> None:
    result = autoprof("doctor", AUTOPROF_RANKS="x")
    assert result.returncode == 2
    assert result.stderr.startswith("autoprof: AUTOPROF_RANKS: got 'x'")
