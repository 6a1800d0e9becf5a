"""Installation: autoprof is activated automatically, and an uninstall leaves nothing that breaks Python."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import helpers
from tests.support.helpers import ROOT

SHOW = "import sys; print('autoprof._boot' in sys.modules)"


def run(*command: str, cwd: Path = ROOT, **variables: str) -> str:
    result = helpers.run(command, cwd=cwd, PIP_DISABLE_PIP_VERSION_CHECK="1", **variables)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout.strip()


def pip(*arguments: str) -> str:
    return run(sys.executable, "-m", "pip", *arguments)


@pytest.fixture(scope="module", params=["wheel", "editable"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel, or the wheel of an editable install, with the project's build backend."""
    return build(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def build(kind: str, folder: Path) -> Path:
    code = f"import hatchling.build; print(hatchling.build.build_{kind}({str(folder)!r}))"
    return folder / run(sys.executable, "-c", code)


class Environment:
    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = str(folder / "bin" / "python")
        (self.site,) = folder.glob("lib/python*/site-packages")

    def pip(self, *arguments: str) -> None:
        pip("--python", self.python, *arguments)

    def show(self, *arguments: str, **variables: str) -> str:
        return run(self.python, *arguments, "-c", SHOW, cwd=self.site, **variables)


@pytest.fixture
def fresh(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "venv")


def test_the_wheel_contains_recipes_and_both_ways_of_activation(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wheel.name.startswith("autoprof_rl-")
    assert {"autoprof.pth", "autoprof.start", "_autoprof_gate.py"} <= names
    recipes = {f"autoprof/recipes/{path.name}" for path in (ROOT / "recipes").iterdir()}
    assert {"autoprof/recipes/verl.v1.toml", "autoprof/recipes/recipe.schema.json"} <= recipes <= names
    templates = (ROOT / "autoprof" / "report" / "templates").iterdir()
    assert {f"autoprof/report/templates/{path.name}" for path in templates} <= names
    assert {"autoprof/sitecustomize/sitecustomize.py", "autoprof/py.typed"} <= names
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"autoprof", "autoprof.pth", "autoprof.start", "_autoprof_gate.py"}


def test_autoprof_is_active_while_installed_and_removed_completely(built: Path, fresh: Environment) -> None:
    (fresh.site / "other.py").touch()
    fresh.pip("install", "--quiet", "--no-deps", str(built))
    assert fresh.show(AUTOPROF="1") == "True"
    assert fresh.show() == "False"
    assert fresh.show("-I", AUTOPROF="1") == "True"
    assert run(fresh.python, "-c", "from autoprof import _boot; print('verl' in _boot.recipe_files())") == "True"
    fresh.pip("uninstall", "--quiet", "--yes", "autoprof-rl")
    assert {name for name in os.listdir(fresh.site) if name != "__pycache__"} == {"other.py"}
    assert fresh.show(AUTOPROF="1") == "False"


def test_remaining_files_do_not_break_python(fresh: Environment) -> None:
    for name in ("autoprof.pth", "_autoprof_gate.py"):
        (fresh.site / name).write_bytes((ROOT / "sitecustomize" / name).read_bytes())
    assert fresh.show(AUTOPROF="1") == "False"
    (fresh.site / "_autoprof_gate.py").unlink()
    assert fresh.show(AUTOPROF="1") == "False"


@pytest.fixture
def read_only(fresh: Environment, wheel: Path) -> Iterator[Environment]:
    """Environment with autoprof whose site-packages is mounted read-only, so that even root can't write to it."""
    fresh.pip("install", "--quiet", "--no-deps", "--no-compile", str(wheel))
    site = str(fresh.site)
    if subprocess.run(["mount", "--bind", site, site], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a disk")
    subprocess.run(["mount", "-o", "remount,bind,ro", site], check=True)
    yield fresh
    subprocess.run(["umount", "-l", site], check=True)


@pytest.mark.fault("site-packages can't be written", "continues", "nothing")
def test_autoprof_works_if_site_packages_is_read_only(read_only: Environment) -> None:
    with pytest.raises(OSError, match="Read-only file system"):
        (read_only.site / "x").touch()
    assert read_only.show(AUTOPROF="1") == "True"


def test_autoprof_run_activates_a_folder_on_pythonpath(wheel: Path, fresh: Environment, tmp_path: Path) -> None:
    # A folder of `pip install --target` is used through PYTHONPATH, where Python does not run .pth files.
    folder = tmp_path / "target"
    pip("install", "--quiet", "--no-deps", "--target", str(folder), str(wheel))
    site = str(folder / "autoprof" / "sitecustomize")
    assert fresh.show(AUTOPROF="1", PYTHONPATH=str(folder)) == "False"
    assert fresh.show(AUTOPROF="1", PYTHONPATH=site) == "True"


def test_entry_points_name_the_gate(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        text = archive.read(name).decode()
    assert "[verl.plugins]\nautoprof = _autoprof_gate\n" in text
    assert "[vllm.general_plugins]\nautoprof = _autoprof_gate:activate\n" in text
