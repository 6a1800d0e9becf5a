"""Environments with other engine releases, which `make test-engines` creates from `requirements/`."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support import processes
from tests.support.helpers import ROOT, clean_environment

ALL = sorted(path.stem for path in (ROOT / "tests" / "engines" / "requirements").glob("*.txt"))
# Names of the environments to test.
NAMES = sorted(os.environ.get("ENGINES", "").split()) or ALL


def python_of(name: str) -> str:
    """Return the path of the interpreter of the environment `name`.

    Raises:
        AssertionError: The environment does not exist.
    """
    folder = ROOT / ".venvs" / name
    assert (folder / ".ready").exists(), f"{folder} does not exist; run make test-engines"
    return str(folder / "bin" / "python")


class Engine:
    """Environment of an engine on a CPU, in a folder with a tiny model."""

    def __init__(self, name: str, folder: Path, cores: str = "0", **variables: str) -> None:
        """Args:
        name: Name of the environment.
        folder: Folder of the model, and working directory.
        cores: Cores of SGLang's ranks. Without this variable, SGLang needs a NUMA node for each rank.
        variables: Further environment variables.
        """
        self.python, self.folder, self.model = python_of(name), folder, str(folder / "model")
        path = [str(ROOT / "tests" / "engines" / "sglang_cpu"), *filter(None, [variables.pop("PYTHONPATH", "")])]
        sglang = {"PYTHONPATH": ":".join(path), "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": cores}
        self.environment = clean_environment(
            OMP_NUM_THREADS="1",
            HF_HUB_OFFLINE="1",
            TORCHDYNAMO_DISABLE="1",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            **(sglang if name.startswith("sglang-") else {}),
            **variables,
        )
        self.run(ROOT / "tests" / "engines" / "sglang_scripts" / "model.py", self.model)

    def run(self, script: Path, *arguments: str, timeout_s: float = 300, **variables: str) -> processes.Finished:
        """Run a script that succeeds.

        Raises:
            AssertionError: The script failed.
        """
        command, env = [self.python, str(script), *arguments], self.environment | variables
        finished = processes.run(command, cwd=self.folder, env=env, timeout_s=timeout_s)
        assert finished.status == 0, finished.output[-4000:]
        return finished


def one_package(name: str, package: str, folder: Path) -> str:
    """Make a folder for PYTHONPATH with one package of the environment `name`, and return its path.

    An interpreter of another environment imports the package from there. TRL can't be installed beside verl, because
    verl 0.9.1 does not start with TRL 1.13 or later.
    """
    (packages,) = (ROOT / ".venvs" / name).glob("lib/python3*/site-packages")
    folder.mkdir()
    for path in [packages / package, *packages.glob(f"{package}-*.dist-info")]:
        (folder / path.name).symlink_to(path)
    return str(folder)
