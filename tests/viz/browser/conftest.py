"""A headless Chromium that opens pages, and tells of every request and every error."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, to drive a browser")

Open = Callable[..., "sync_api.Page"]
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def _chromium() -> str | None:
    """The browser of this machine; on a Debian that may be changed it is installed first."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None and shutil.which("apt-get") and os.geteuid() == 0:
        with FileLock(Path(tempfile.gettempdir()) / "chromium.lock"):
            for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
                subprocess.run(["apt-get", "-qq", *command], check=False, capture_output=True, timeout=600)
        found = shutil.which("chromium")
    return found


@pytest.fixture(scope="package")
def browser() -> Iterator[sync_api.Browser]:
    path = _chromium()
    if path is None:
        pytest.skip("needs Chromium, which could not be installed: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: sync_api.Browser) -> Iterator[Open]:
    """Opens a file; at the end, nothing but files was asked for and nothing went wrong in any page."""
    requests: list[str] = []
    errors: list[str] = []
    opened: list[sync_api.BrowserContext] = []

    def opens(
        path: Path, fragment: str = "", *, size: tuple[int, int] = (1400, 900), **options: object
    ) -> sync_api.Page:
        viewport = {"width": size[0], "height": size[1]}
        context = browser.new_context(viewport=viewport, locale="en-US", **options)  # type: ignore[arg-type]
        opened.append(context)
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.on("dialog", lambda dialog: (errors.append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri() + fragment)
        page.wait_for_selector("body[data-ready]")
        return page

    yield opens
    for context in opened:
        context.close()
    assert not errors
    assert [url for url in requests if not url.startswith(("file:", "blob:"))] == []
