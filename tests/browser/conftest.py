"""A console of real processes, and a real Chromium that is watched: whatever it complains of fails the test."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
READY_SECONDS = 120


def _two_free_ports() -> int:
    """A port that is free, with the one after it: the sandbox of payments takes that."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


@pytest.fixture(scope="module")
def console_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a console with the starter catalogue, in a folder of its own."""
    var = tmp_path_factory.mktemp("var")
    port = _two_free_ports()
    url = f"http://127.0.0.1:{port}"
    kept = {key: value for key, value in os.environ.items() if key not in {"DJANGO_SETTINGS_MODULE", "DEBUG"}}
    environment = kept | {
        "TRAINYARD_VAR": str(var),
        "TRAINYARD_URL": url,
        "TRAINYARD_STATIC_ROOT": str(ROOT / "var" / "test-static"),
        "TRAINYARD_IMAGES_ROOT": os.environ.get("TRAINYARD_IMAGES_ROOT", str(ROOT / "var" / "images")),
    }
    output = var / "up.log"
    with output.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "up"], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
    try:
        _wait(url, process, output)
        subprocess.run(
            [sys.executable, "manage.py", "seed_catalogue"], cwd=ROOT, env=environment, check=True, capture_output=True
        )
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _wait(url: str, process: subprocess.Popen[bytes], output: Path) -> None:
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        assert process.poll() is None, output.read_text()
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    pytest.fail(f"The console did not get ready:\n{output.read_text()}")


@dataclass
class Watched:
    """A page, and everything in it that went wrong."""

    page: Page
    folder: Path
    complaints: list[str] = field(default_factory=list)
    shots: int = 0

    def shot(self, name: str) -> None:
        """Keep a picture of the page as it is."""
        self.shots += 1
        self.page.screenshot(path=self.folder / f"{self.shots:02d}-{name}.png", full_page=True)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A headless Chromium. It holds an event loop while it is open, which other modules' tests must not find."""
    if CHROMIUM is None:
        pytest.skip("There is no Chromium here: apt-get install chromium.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def watched(chromium: Browser, tmp_path: Path) -> Iterator[Watched]:
    """A fresh window. Console errors, failed requests, exceptions: each is a complaint, asserted at the end."""
    folder = Path(os.environ.get("TRAINYARD_SCREENSHOTS", tmp_path / "screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    context = chromium.new_context(viewport={"width": 1440, "height": 900}, locale="en")
    page = context.new_page()
    watched = Watched(page, folder)

    def said(message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            watched.complaints.append(f"{message.type}: {message.text} {message.location}")

    def failed(request: Request) -> None:
        # A stream that is closed on purpose, or left with its page, ends as aborted.
        if request.failure != "net::ERR_ABORTED":
            watched.complaints.append(f"failed: {request.url} {request.failure}")

    def answered(response: Response) -> None:
        if response.status >= 400:
            watched.complaints.append(f"{response.status}: {response.url}")

    page.on("console", said)
    page.on("pageerror", lambda error: watched.complaints.append(f"exception: {error}"))
    page.on("requestfailed", failed)
    page.on("response", answered)
    yield watched
    context.close()
    assert watched.complaints == []
