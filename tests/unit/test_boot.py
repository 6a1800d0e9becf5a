"""Interpreter start, in real interpreters."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from autoprof._boot import Command
from autoprof.config import settings
from tests.support.helpers import ROOT, Python
from tests.support.recipe_texts import recipe

BOOT = ["autoprof", "autoprof._boot", "autoprof._boot.finder"]
SHOW = "import sys; print(sorted(name for name in sys.modules if name.split('.')[0] == 'autoprof'))"


@pytest.mark.parametrize("value", [None, "0", "", "off", "false", "no", "2"])
def test_off_imports_nothing(python: Python, value: str | None) -> None:
    variables = {} if value is None else {"AUTOPROF": value}
    assert python(SHOW, **variables).stdout.strip() == "[]"
    assert python("import sys; print('_autoprof_gate' in sys.modules)", **variables).stdout.strip() == "False"


@pytest.mark.parametrize("value", ["1", "true", "ON", " yes "])
def test_on_imports_only_the_boot_package_of_autoprof(python: Python, value: str) -> None:
    assert python(SHOW, AUTOPROF=value).stdout.strip() == str(BOOT)


def test_on_imports_only_fast_modules_of_the_standard_library(python: Python) -> None:
    code = "import sys; print('\\n'.join(sys.modules))"
    # Other packages have .pth files too, so the difference counts.
    off = set(python(code).stdout.split())
    new = set(python(code, AUTOPROF="1").stdout.split()) - off
    assert {name.split(".")[0] for name in new} - {"autoprof", "_autoprof_gate"} <= sys.stdlib_module_names
    assert not new & {"asyncio", "logging", "tomllib", "importlib.metadata", "re", "json", "typing"}


def test_nothing_is_written_without_a_target(python: Python, tmp_path: Path) -> None:
    python("import json", AUTOPROF="1")
    assert list(tmp_path.iterdir()) == []


def test_activation_is_idempotent(python: Python) -> None:
    code = """
import sys, _autoprof_gate
from autoprof import _boot
from autoprof._boot.finder import Finder
_autoprof_gate.activate(); _boot.activate()
print(sum(isinstance(finder, Finder) for finder in sys.meta_path))
"""
    assert python(code, AUTOPROF="1").stdout.strip() == "1"


def test_children_share_the_run_id(python: Python) -> None:
    code = """
import os, subprocess, sys
show = "import os; print(os.environ['AUTOPROF_RUN_ID'])"
print(os.environ["AUTOPROF_RUN_ID"], subprocess.check_output([sys.executable, "-c", show], text=True).strip())
"""
    mine, childs = python(code, AUTOPROF="1").stdout.split()
    assert mine == childs


@pytest.mark.parametrize(
    ("command", "foreign"),
    [
        ("python -m pip install x", True),
        ("python /usr/bin/pip install x", True),
        ("python -u /site-packages/ray/dashboard/dashboard.py --host=x", True),
        ("python /site-packages/ray/_private/workers/setup_worker.py a", True),
        ("python /site-packages/ray/_private/workers/default_worker.py a", False),
        ("python -X utf8 -m vllm.model_executor.models.registry", True),
        ("python -m verl.trainer.main_ppo", False),
        ("python -m verl.trainer.main_ppo pip", False),
        ("python train.py", False),
        ("python", False),
    ],
)
def test_foreign_processes_are_recognised(command: str, foreign: bool) -> None:
    assert Command(command.split()).foreign is foreign


@pytest.mark.parametrize(
    ("command", "launches"),
    [
        ("python /usr/bin/torchrun --nproc-per-node 2 train.py", True),
        ("python -m torch.distributed.run train.py", True),
        ("python -u /usr/bin/accelerate launch train.py", True),
        ("python train.py torchrun", False),
        ("python -m trl.scripts.grpo", False),
        ("python -c torchrun", False),
        ("python", False),
    ],
)
def test_launchers_are_recognised(command: str, launches: bool) -> None:
    assert Command(command.split()).launcher is launches


def test_ranks_belong_to_the_run_of_their_launcher(tmp_path: Path, python: Python) -> None:
    show = (
        "import os; info = json.loads(os.environ['AUTOPROF_RUN_INFO']); print(info['pid'], info['settings']['steps'])"
    )
    (tmp_path / "torchrun").write_text(f"import json, os; {show}; print(os.getpid())")
    (mine, steps), (pid,) = (line.split() for line in python(["torchrun"], AUTOPROF="1").stdout.splitlines())
    assert (mine, steps) == (pid, "+2")
    wrong = python(["torchrun"], check=False, AUTOPROF="1", AUTOPROF_STEPS="x")
    assert wrong.stderr.count("autoprof") >= 1
    assert "AUTOPROF_RUN_INFO" in wrong.stderr  # the script's own KeyError, because it runs without autoprof


def test_spawned_children_are_not_foreign_and_the_resource_tracker_is() -> None:
    spawn = "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5, pipe_handle=7)"
    assert not Command(["python", "-c", spawn, "--multiprocessing-fork"]).foreign
    assert Command(["python", "-c", "from multiprocessing.resource_tracker import main;main(5)"]).foreign


def test_a_ray_worker_does_not_start_a_run(tmp_path: Path, python: Python) -> None:
    worker = tmp_path / "ray" / "_private" / "workers" / "default_worker.py"
    worker.parent.mkdir(parents=True)
    worker.write_text("import os; print(os.environ.get('AUTOPROF_RUN_ID'))")
    assert python([str(worker)], AUTOPROF="1").stdout.strip() == "None"
    assert python([str(worker)], AUTOPROF="1", AUTOPROF_RUN_ID="of-the-driver").stdout.strip() == "of-the-driver"


def test_a_failed_boot_prints_one_line_and_switches_children_off(python: Python) -> None:
    paths = [str(ROOT), str(ROOT / "sitecustomize")]
    code = f"""
import os, subprocess, sys
sys.path[:0] = {paths}
os.listdir = None  # the recipes can't be listed
import _autoprof_gate
print(os.environ["AUTOPROF"])
show = "import os; print(os.environ['AUTOPROF'])"
child = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True)
print(child.stdout.strip(), repr(child.stderr))
"""
    # -S, so that `site` has not activated autoprof before.
    result = python(["-S", "-c", code], AUTOPROF="1")
    assert result.stdout.splitlines() == ["0", "0 ''"]
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("autoprof: could not start (TypeError")
    assert result.stderr.strip().endswith("autoprof is off for this run")


@pytest.fixture
def tiny(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text("def step(number): return number\n")
    (tmp_path / "tiny.toml").write_text(recipe("tiny", ("step", "step", "step.wrap", 'number = "number"')))


HOSTILE = {"long": b"x" * 30_000, "controls": b"a\x1b[31m\x07\r\nb\x7f", "no UTF-8": b"\xff\xfe\x80/\xed\xa0\x80"}
TWICE = """
import subprocess, sys, tiny
print(tiny.step(7), flush=True)
if len(sys.argv) == 1:
    sys.exit(subprocess.run([sys.executable, __file__, "child"]).returncode)
"""


@pytest.mark.usefixtures("tiny")
@pytest.mark.fault("a variable has any content", "continues, and so do its children", "the captures")
@pytest.mark.parametrize(
    ("content", "names"),
    [*((content, "all") for content in HOSTILE), ("controls", "CONFIG"), ("long", "DIR"), ("no UTF-8", "DIR")],
)
def test_any_content_of_variables_costs_at_most_one_line(
    content: str, names: str, tmp_path: Path, python: Python
) -> None:
    (tmp_path / "main.py").write_text(TWICE)
    # Leave out the variables that autoprof passes to child processes: with them it does not read the settings.
    every = [name for name in settings.VARIABLES if name not in ("RUN_INFO", "STARTER", "RECIPES")]
    value = os.fsdecode(HOSTILE[content])
    variables = {f"AUTOPROF_{name}": value for name in (every if names == "all" else [names])}
    result = python(["main.py"], AUTOPROF="1", **{"AUTOPROF_RECIPES": "tiny.toml"} | variables)
    assert result.stdout == "7\n7\n"
    assert result.stderr.count("\n") <= 1
    assert len(result.stderr) < 1200
    assert result.stderr.replace("\n", "").isprintable()


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("argument", [b"caf\xe9", b"--name=caf\xe9", b"--name=\xff\xfe\x80"])
def test_an_argument_that_is_not_utf_8_costs_nothing(argument: bytes, tmp_path: Path, python: Python) -> None:
    (tmp_path / "main.py").write_text("import tiny\nprint(tiny.step(7))\n")
    arguments = ["main.py", "--token", "hunter2hunter2", os.fsdecode(argument), "--lr", "1"]
    result = python(arguments, AUTOPROF="1", AUTOPROF_STEPS="", AUTOPROF_RECIPES="tiny.toml")
    assert (result.stdout, "autoprof is off" in result.stderr) == ("7\n", False)
    run = tmp_path / "autoprof_runs" / "latest" / "run.json"
    shown = argument.decode("utf-8", "surrogateescape").encode("utf-8", "backslashreplace").decode()
    assert json.loads(run.read_text())["command"].endswith(f" main.py --token '***' '{shown}' --lr 1")


@pytest.mark.usefixtures("tiny")
def test_a_trainer_first_imported_with_a_fake_os_runs_without_autoprof(tmp_path: Path, python: Python) -> None:
    code = """
import os, sys
class FakeOsModule:
    def __getattr__(self, name):
        return getattr(os, name)
sys.modules["os"] = FakeOsModule()
import tiny
print(tiny.step(7))
"""
    (tmp_path / "main.py").write_text(code)
    result = python(["main.py"], AUTOPROF="1", AUTOPROF_RECIPES="tiny.toml")
    assert result.stdout == "7\n"
    assert result.stderr == (
        "autoprof: could not load the recipes for tiny (ImportError: os is a FakeOsModule now, not Python's module; "
        "import the trainer before that); autoprof is off for this run\n"
    )


def test_sitecustomize_runs_the_one_that_it_hides(tmp_path: Path, python: Python) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.users_sitecustomize = __name__")
    path = f"{ROOT / 'sitecustomize'}:{tmp_path}"
    code = "import sys; print(sys.users_sitecustomize, 'autoprof._boot' in sys.modules)"
    assert python(code, PYTHONPATH=path).stdout.strip() == "sitecustomize False"
    assert python(code, PYTHONPATH=path, AUTOPROF="1").stdout.strip() == "sitecustomize True"


# Program that prints all that it can observe of its sitecustomize.
LOOK = """
import importlib, importlib.util, json, os, sys
def look():
    try:
        import sitecustomize
    except ImportError as error:
        return [type(error).__name__, str(error), error.name, importlib.util.find_spec("sitecustomize") is None]
    except RuntimeError as error:
        return [repr(error), "sitecustomize" in sys.modules]
    spec = sitecustomize.__spec__
    found = [sitecustomize.__name__, getattr(sitecustomize, "__file__", None), getattr(sitecustomize, "X", None)]
    return [*found, sitecustomize is sys.modules["sitecustomize"], spec and (spec.origin, type(spec.loader).__name__)]
def again():
    try:
        return importlib.reload(sys.modules["sitecustomize"]).__spec__.origin
    except Exception as error:
        return repr(error)
print(json.dumps([look(), again(), look(), sys.path, "usercustomize" in sys.modules, getattr(sys, "said", [])]))
"""
USERS = {
    "none": {},
    "module": {"sitecustomize.py": "import sys; X = 1; sys.said = [__name__, list(sys.path), list(sys.argv)]"},
    "package": {"sitecustomize/__init__.py": "from .inner import X", "sitecustomize/inner.py": "X = 2"},
    "folder": {"sitecustomize/other.py": ""},
    "raising": {"sitecustomize.py": "import sys; sys.said = 'before'; raise RuntimeError('the user made this')"},
    "import error": {"sitecustomize.py": "import not_there"},
    "its own import error": {"sitecustomize.py": "raise ImportError('mine', name='sitecustomize')"},
    "ending": {"sitecustomize.py": "raise SystemExit(3)"},
    "importing itself": {"sitecustomize.py": "import sitecustomize; sitecustomize.X = 3"},
    "replacing itself": {
        "sitecustomize.py": "import sys, types; sys.modules[__name__] = own = types.ModuleType('own'); own.X = 4"
    },
    "with usercustomize": {
        "sitecustomize.py": "X = 5",
        "usercustomize.py": "import sitecustomize; sitecustomize.X = 6",
    },
}


@pytest.mark.parametrize("users", USERS)
def test_a_sitecustomize_behaves_as_without_autoprof(users: str, tmp_path: Path, python: Python) -> None:
    for name, text in USERS[users].items():
        (tmp_path / "users" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "users" / name).write_text(text)
    (tmp_path / "look.py").write_text(LOOK)
    path, ours = str(tmp_path / "users"), str(ROOT / "sitecustomize")
    off = python(["look.py"], check=False, PYTHONPATH=path)
    for before in (ours, f"{ours}{os.pathsep}{ours}"):
        on = python(["look.py"], check=False, PYTHONPATH=f"{before}{os.pathsep}{path}", AUTOPROF="1")
        assert (on.stdout, said(on), on.returncode) == (off.stdout, said(off), off.returncode)


def said(result: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines on stderr, without frames of tracebacks and autoprof's line for a run without hooks."""
    return [line for line in result.stderr.splitlines() if not line.startswith(("  ", "autoprof: no recipe for"))]


def test_a_sitecustomize_in_a_zip_behaves_as_without_autoprof(tmp_path: Path, python: Python) -> None:
    with zipfile.ZipFile(tmp_path / "users.zip", "w") as archive:
        archive.writestr("sitecustomize.py", "X = 7")
    path = f"{ROOT / 'sitecustomize'}{os.pathsep}users.zip"
    assert python(LOOK, PYTHONPATH=path, AUTOPROF="1").stdout == python(LOOK, PYTHONPATH="users.zip").stdout


def test_a_command_under_autoprof_run_has_its_own_sitecustomize(tmp_path: Path, python: Python) -> None:
    (tmp_path / "sitecustomize.py").write_text("X = 8")
    code = "import os, subprocess, sys, sitecustomize; print(sitecustomize.X, os.environ['AUTOPROF']"
    twice = f"{code}, flush=True); subprocess.run([sys.executable, '-c', {f'{code})'!r}])"
    run = ["-m", "autoprof", "run", "--", sys.executable, "-c", twice]
    assert python(run, PYTHONPATH=str(tmp_path)).stdout.split() == ["8", "1", "8", "1"]


def test_sitecustomize_activates_autoprof_if_it_is_not_installed(python: Python, tmp_path: Path) -> None:
    # -S leaves out site-packages and with it the installed .pth; the code imports sitecustomize as `site` does.
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "sitecustomize")!r})
try:
    import sitecustomize
except ImportError:
    print("autoprof._boot" in sys.modules)
"""
    result = python(["-S", "-c", code], AUTOPROF="1")
    assert result.stdout.strip() == "True"


@pytest.fixture(params=["checkout", "wheel"])
def laid_out(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Copy autoprof to a folder with the name that `git clone` uses, below a folder with a space in its name."""
    root = tmp_path / "a folder" / "autoprof"
    inside = root if request.param == "checkout" else root / "autoprof"
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "autoprof", root / "autoprof", ignore=without)
    for name in ("recipes", "sitecustomize"):
        shutil.copytree(ROOT / name, inside / name, ignore=without)
    return root


@pytest.mark.parametrize("python_path", ["", "the folder that it is in"])
def test_run_activates_from_a_checkout_called_autoprof_and_from_a_wheel(
    laid_out: Path, python: Python, python_path: str
) -> None:
    # -S leaves out site-packages, as if nothing were installed; the code imports sitecustomize as `site` does.
    start = "import sys; sys.path.insert(0, sys.argv[1]); from autoprof.cli.main import main; main(sys.argv[2:])"
    show = """
import contextlib, sys
with contextlib.suppress(ImportError): import sitecustomize
print(sys.modules['autoprof._boot'].__file__, *sys.modules['autoprof'].__path__)
"""
    variables = {"PYTHONPATH": str(laid_out.parent)} if python_path else {}
    result = python(["-c", start, str(laid_out), "run", "--", sys.executable, "-S", "-c", show], **variables)
    package = laid_out / "autoprof"
    assert result.stdout.strip() == f"{package / '_boot' / '__init__.py'} {package}"
    assert result.stderr == ""
