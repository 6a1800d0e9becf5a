"""Generator of the pictures in docs/images: the page of a generated run, in Chromium.

python -m tests.support.report_pictures docs/images
"""

from __future__ import annotations

import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page

from autoprof.report import build, html
from autoprof.rundir import runs
from tests.support import report_runs
from tests.support.browsing import chromium

_PLANTED = {"slow_tool": 5, "slow_replica": 12, "slow_rank": 17, "long_weight_sync": 26, "slow_step": 33}
# Picture -> part of the page at its top, and theme.
_SHOWN = {
    "report-run": ("body", "light"),
    "report-step": ("#step-5", "light"),
    "report-samples": ("#step-5 h4:has-text('Samples')", "light"),
    "report-capture": ("#step-5 .capture:has-text('update_actor')", "light"),
    "report-dark": ("#step-5", "dark"),
}
# Findings shown in docs/findings.md -> height of the picture in pixels.
_FINDINGS = {"slow_replica": 1220, "slow_rank": 800}


def _shoot(page: Page, url: str, part: str, theme: str, path: Path, step: int = 5) -> None:
    page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
    page.goto(url)
    page.locator(f"#step-{step}").evaluate("(step) => (step.open = true)")
    place = page.locator(part).first
    place.evaluate("(place) => { if (place.tagName === 'DETAILS') place.open = true; }")
    for _ in range(3):
        # Scrolling makes the page draw charts, which move the parts below them.
        place.evaluate("(place) => scrollTo(0, scrollY + place.getBoundingClientRect().top - 60)")
        page.wait_for_timeout(700)
    Image.open(BytesIO(page.screenshot())).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(
        path, optimize=True
    )


def main(folder: Path) -> None:
    """Write all pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made, chromium() as browser:
        run = Path(made) / "20261122-010203-abcdef"
        report_runs.write(run, steps=40, captured=5, **_PLANTED)
        file = Path(made) / "report.html"
        html.write(build.report_figures(build.ReportRequest(run=runs.read(run))), file)
        for name, (part, theme) in _SHOWN.items():
            page = browser.new_page(viewport={"width": 1280, "height": 1220 if part == "body" else 800})
            _shoot(page, file.as_uri(), part, theme, folder / f"{name}.png")
            page.close()
        for kind, height in _FINDINGS.items():
            step = _PLANTED[kind]
            html.write(build.report_figures(build.ReportRequest(run=runs.read(run), step=step)), file)
            page = browser.new_page(viewport={"width": 1280, "height": height})
            _shoot(page, file.as_uri(), f"#step-{step}", "light", folder / f"finding-{kind}.png", step)
            page.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
