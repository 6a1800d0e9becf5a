"""Helper processes if `sys.executable` is not a Python: the user's program is never started again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from autoprof.base import interpreter
from tests.support import helpers
from tests.support.helpers import ROOT, Python
from tests.support.small_trainer import BEGIN, metas, warnings

# Program that embeds Python and notes each of its starts.
EMBEDDED = """
#include <Python.h>
int main(int argc, char **argv) {
    FILE *mark = fopen(getenv("MARK"), "a");
    fputs("started\\n", mark);
    fclose(mark);
    PyConfig config;
    PyConfig_InitPythonConfig(&config);
    config.parse_argv = 0;
    PyConfig_SetBytesString(&config, &config.program_name, argv[0]);
    PyConfig_SetBytesString(&config, &config.executable, argv[0]);
    if (PyStatus_Exception(Py_InitializeFromConfig(&config))) return 99;
    int failed = PyRun_SimpleString(argv[1]);
    return Py_FinalizeEx() < 0 || failed;
}
"""
# Also waits for the work after the run, if any.
MERGING = {"AUTOPROF_CONTENTS": "cpu,merge-profiles"}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Program of the user that writes a file when it is started."""
    path = tmp_path / "trainer"
    path.write_text(f"#!/bin/sh\necho started >> {tmp_path}/mark\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("executable", ["program", "program named python", "frozen", "", None])
def test_the_users_program_is_no_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: Path, executable: str | None
) -> None:
    if executable == "program named python":
        program = program.rename(tmp_path / "python3")
    if executable == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    python = sys.executable
    monkeypatch.setattr(sys, "executable", str(program) if executable else executable)
    interpreter._find.cache_clear()
    assert os.path.samefile(interpreter.find(), python)
    assert not (tmp_path / "mark").exists()


# Any other value that is not a Python is replaced by the same interpreter, as tested above.
@pytest.mark.fault("sys.executable is no Python", "goes on; its program is not started", "nothing")
def test_the_users_program_is_not_started_again(go: Python, tmp_path: Path, program: Path) -> None:
    done = go(f"sys.executable = {str(program)!r}; Trainer().fit(); sys.exit(7)", check=False, **MERGING)
    assert done.returncode == 7
    assert [meta["state"] for meta in metas(tmp_path)] == ["complete"]
    assert list((tmp_path / "autoprof_runs" / "latest").glob("*/*.gz"))
    assert warnings(done) == []
    assert not (tmp_path / "mark").exists()


@pytest.fixture
def embedded(tmp_path: Path) -> Path:
    if not shutil.which("cc") or not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        pytest.skip("there is no compiler, or no shared library of Python")
    (tmp_path / "trainer.c").write_text(EMBEDDED)
    names = ("LIBDIR", "INCLUDEPY", "LDVERSION")
    libraries, headers, version = (str(sysconfig.get_config_var(name)) for name in names)
    link = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", f"-lpython{version}"]
    subprocess.run(["cc", "trainer.c", "-o", "trainer", f"-I{headers}", *link], cwd=tmp_path, check=True)
    return tmp_path / "trainer"


@pytest.mark.fault("Python is embedded in a program", "goes on; it is started once", "nothing")
def test_a_program_with_python_in_it_is_started_once(go: Python, tmp_path: Path, embedded: Path) -> None:
    packages = [str(tmp_path / "lib"), str(ROOT), sysconfig.get_path("purelib")]
    recipes = str(tmp_path / "lib" / "small.toml")
    settings = MERGING | {"AUTOPROF": "1", "AUTOPROF_STEPS": "2", "AUTOPROF_RECIPES": recipes, "OMP_NUM_THREADS": "1"}
    settings |= {"MARK": str(tmp_path / "mark"), "PYTHONHOME": sys.base_prefix, "PYTHONPATH": os.pathsep.join(packages)}
    code = f"import _autoprof_gate\n{BEGIN}\nassert sys.executable.endswith('trainer')\nTrainer().fit(); print('end')"
    done = helpers.run([str(embedded), code], cwd=tmp_path, **settings)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert [meta["state"] for meta in metas(tmp_path)] == ["complete"]
    assert (tmp_path / "mark").read_text() == "started\n"


def test_where_there_is_no_python_it_is_said_what_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_others", lambda: iter(["/nowhere/python3", "/bin/sh", ""]))
    monkeypatch.setattr(sys, "executable", "/opt/trainer")
    with pytest.raises(OSError, match=r"no cpython 3\.\d+ was found to start: sys.executable is '/opt/trainer'"):
        interpreter.find()


def test_this_interpreter_is_known_without_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(subprocess, "run")
    interpreter._find.cache_clear()
    assert interpreter.find() == sys.executable
