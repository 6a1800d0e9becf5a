"""Runs of older releases of verl. Each release's wheel precedes the environment's verl; vLLM and Ray are the same."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.real.assets import assets
from tests.releases.release_command import overrides
from tests.support import processes
from tests.support.helpers import ROOT, clean_environment
from tests.support.verl_runs import VerlRun

# Release with two designs that 0.9.1 lacks: the engine in the trainer's worker, and FSDP workers beside a server.
CHOSEN = "verl-0.5.0"
EXAMPLES = ROOT / "examples" / "verl_cpu"
STEPS = 3
# A quiet machine with 2 cores needs 80 to 110 s.
TIMEOUT_S = 420


def version_of(name: str) -> tuple[int, ...]:
    """Return the version in a name: (0, 7, 1) for `verl-0.7.1`."""
    return tuple(int(part) for part in name.removeprefix("verl-").split("."))


def package_of(name: str) -> Path:
    """Return the folder that contains the release's package `verl`.

    Raises:
        AssertionError: The folder does not exist.
    """
    folder = ROOT / ".venvs" / name
    assert (folder / ".ready").exists(), f"{folder} does not exist; run make test-releases"
    return folder


def environment(name: str, **variables: str) -> dict[str, str]:
    """Return an environment in which `import verl` finds the release, and in which it runs on a CPU."""
    path = [package_of(name), ROOT / "tests" / "releases" / "cpu", EXAMPLES / "cpu"]
    # The same as in examples/verl_cpu/run_grpo.sh, which gives the reasons.
    settings = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "RAY_ADDRESS": "local",
        "RAY_DEDUP_LOGS": "0",
        "HYDRA_FULL_ERROR": "1",
    }
    if version_of(name) >= (0, 9):
        settings |= {
            "VERL_PLATFORM": "cpu",
            "VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform",
            "VERL_ENGINE_DEVICE": "cuda",
        }
    found = clean_environment(PYTHONPATH=":".join(map(str, path)), **settings, **variables)
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    return found


def release_run(name: str, folder: Path, **variables: str) -> VerlRun:
    """Run three steps of GRPO with the release's own command line."""
    options = overrides(package_of(name), assets=assets(), examples=EXAMPLES)
    if version_of(name) >= (0, 9):
        options.append("trainer.device=cpu")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *options, f"trainer.total_training_steps={STEPS}"]
    finished = processes.run_framework(command, cwd=folder, env=environment(name, **variables), timeout_s=TIMEOUT_S)
    assert finished.status == 0, "\n".join(finished.output.splitlines()[-60:])
    return VerlRun(folder, finished, folder)
