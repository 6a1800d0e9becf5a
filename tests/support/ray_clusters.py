"""Ray clusters for scripts, and their environment."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from tests.support import processes
from tests.support.helpers import ROOT, clean_environment

SCRIPTS = ROOT / "tests" / "real" / "ray_scripts"


ON = {"AUTOPROF": "1", "AUTOPROF_RECIPES": str(SCRIPTS)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster that was started before, without autoprof in its environment."""
    folder = tmp_path_factory.mktemp("cluster")
    tag = uuid.uuid4().hex
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0", "--num-cpus=8"]
    options = ["--include-dashboard=false", "--object-store-memory=100000000", f"--temp-dir=/tmp/ray-{tag[:8]}"]
    variables = clean_environment(**{processes.TAG: tag})
    log = folder / "start.log"
    with log.open("w") as file:
        started = subprocess.Popen(
            [*start, *options], cwd=folder, env=variables, stdout=file, stderr=file, start_new_session=True
        )
    try:
        started.wait(120)
        address = re.search(r"--address='([^']+)'", log.read_text())
        assert address is not None, log.read_text()
        yield address[1]
    finally:
        processes.end_all(tag, started.pid, grace_s=0)
        shutil.rmtree(f"/tmp/ray-{tag[:8]}", ignore_errors=True)
