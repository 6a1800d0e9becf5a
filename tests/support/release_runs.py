"""Runs older releases of verl, each its own wheel in front of the environment's verl, beside the same vLLM and Ray."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.real.assets import assets
from tests.releases.release_command import overrides
from tests.support import processes
from tests.support.helpers import ROOT, clean_environment
from tests.support.verl_runs import VerlRun

# One of each form that 0.9.1 does not have: the engine in the trainer's worker, and FSDP workers beside a server.
CHOSEN = "verl-0.5.0"
EXAMPLES = ROOT / "examples" / "verl_cpu"
STEPS = 3
# A quiet machine with 2 cores needs 80 to 110 s.
TIMEOUT_S = 420


def version_of(name: str) -> tuple[int, ...]:
    """`verl-0.7.1` as (0, 7, 1)."""
    return tuple(int(part) for part in name.removeprefix("verl-").split("."))


def package_of(name: str) -> Path:
    """The folder that holds the release's package `verl`.

    Raises:
        AssertionError: It was not made.
    """
    folder = ROOT / ".venvs" / name
    assert (folder / ".ready").exists(), f"{folder} is not there; run make test-releases"
    return folder


def environment(name: str, **variables: str) -> dict[str, str]:
    """The environment in which `import verl` finds the release, and in which it runs on a CPU."""
    path = [package_of(name), ROOT / "tests" / "releases" / "cpu", EXAMPLES / "cpu"]
    # As in examples/verl_cpu/run_grpo.sh, which says why.
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
    """A GRPO run of three steps by the release's own command line."""
    options = overrides(package_of(name), assets=assets(), examples=EXAMPLES)
    if version_of(name) >= (0, 9):
        options.append("trainer.device=cpu")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *options, f"trainer.total_training_steps={STEPS}"]
    finished = processes.run_framework(command, cwd=folder, env=environment(name, **variables), timeout_s=TIMEOUT_S)
    assert finished.status == 0, "\n".join(finished.output.splitlines()[-60:])
    return VerlRun(folder, finished, folder)
