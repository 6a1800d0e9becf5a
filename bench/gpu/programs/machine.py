"""Description of the machine, and a test whether torch.profiler alone records kernels."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.profiler

from bench.gpu.captures import Trace
from bench.gpu.programs.common import arguments, say, synchronize, training

PACKAGES = ("torch", "transformers", "trl", "accelerate", "vllm", "sglang", "verl", "ray", "triton", "wrapt", "msgspec")
_DRIVER = Path("/proc/driver/nvidia/version")


def versions() -> dict[str, str]:
    """Return the releases of the installed packages."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def driver() -> str:
    """Return the release of the driver, or an empty text."""
    smi = shutil.which("nvidia-smi")
    if smi:
        command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
    try:
        words = _DRIVER.read_text().split("\n")[0].split()
        return next((word for word in words if word[:1].isdigit()), "")
    except OSError:
        return ""


def device_of(name: str) -> dict[str, Any]:
    """Return the description of the device."""
    if name == "cpu":
        return {"device": "cpu", "devices": 0, "memory_gb": 0.0}
    found = torch.cuda.get_device_properties(0)
    return {
        "device": found.name,
        "devices": torch.cuda.device_count(),
        "memory_gb": round(found.total_memory / 1e9, 1),
        "capability": f"{found.major}.{found.minor}",
    }


def recorded(device: str) -> dict[str, int]:
    """Record two steps with torch.profiler by hand, and count the events in the trace."""
    step = training(device)
    step()
    with torch.profiler.profile() as profile:
        step()
        step()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        trace = Trace(path)
    return {"kernels": len(trace.kernels), "copies": len(trace.copies), "operators": len(trace.of(["cpu_op"]))}


def main() -> None:
    device = arguments().device
    if device != "cpu" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here (torch.cuda.is_available()): use DEVICE=cpu to try the rest")
    say(
        **device_of(device),
        driver=driver(),
        cuda=torch.version.cuda or "",
        hip=getattr(torch.version, "hip", None) or "",
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)),
        root=os.geteuid() == 0,
        versions=versions(),
        activities=sorted(activity.name for activity in torch.profiler.supported_activities()),
        by_hand=recorded(device),
    )


if __name__ == "__main__":
    main()
