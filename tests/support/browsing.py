"""Real Chromium for tests of pages, with its messages and requests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_QUIET = (
    "--no-sandbox",  # the sandbox does not work for root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the Chromium that `make chromium` installed or found. Skip the test if there is no Chromium."""
    named = os.environ.get("CHROMIUM")
    path = next(filter(None, map(shutil.which, [named] if named else _NAMES)), None)
    if path is None:
        pytest.skip("Chromium not found: run make chromium, or name one with CHROMIUM=PATH")
    with sync_playwright() as playwright:
        # Each launch has its own, empty profile.
        browser = playwright.chromium.launch(executable_path=path, args=_QUIET)
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """Page that records its messages and requests.

    Attributes:
        page: The page.
        said: Console messages, script errors and dialogs.
        asked: URLs of all requests of all pages of the context.
    """

    def __init__(self, context: BrowserContext) -> None:
        self.page: Page = context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        context.on("dialog", self._dialog)
        context.on("request", lambda request: self.asked.append(request.url))

    def _dialog(self, dialog: object) -> None:
        self.said.append(f"dialog: {dialog.message}")  # type: ignore[attr-defined]
        dialog.dismiss()  # type: ignore[attr-defined]
