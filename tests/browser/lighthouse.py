"""Runs Lighthouse, which `make lighthouse` installs, on a page."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Playwright

from tests.browser.conftest import FLAGS, chromium_path
from tests.console.processes import free_port

PROGRAM = Path(__file__).resolve().parents[2] / "var" / "lighthouse" / "node_modules" / ".bin" / "lighthouse"
NOT_INSTALLED = "There is no Lighthouse: it needs node and npm, and `make lighthouse`"
CATEGORIES = ("performance", "accessibility", "best-practices")
PATIENCE_SECONDS = 300
"""How long an audit may take. It takes 20 seconds, and longer on a busy machine."""


@dataclass(frozen=True)
class Audit:
    """Lighthouse's report on a page."""

    report: dict[str, Any]

    @property
    def scores(self) -> dict[str, int]:
        """The score of each category, from 0 to 100."""
        return {name: round(100 * category["score"]) for name, category in self.report["categories"].items()}

    def faults(self, category: str) -> list[str]:
        """Return the audits that cost points in a category, each with the elements concerned."""
        references = self.report["categories"][category]["auditRefs"]
        audits = [self.report["audits"][each["id"]] for each in references if each["weight"]]
        return [
            f"{audit['id']}: {audit['title']} {audit.get('displayValue', '')} {json.dumps(audit.get('details'))[:1000]}"
            for audit in audits
            if audit["score"] is not None and audit["score"] < 1
        ]


def is_installed() -> bool:
    """Return whether Lighthouse and node are installed."""
    return PROGRAM.exists() and shutil.which("node") is not None


def audit(
    playwright: Playwright,
    url: str,
    *,
    categories: Sequence[str] = CATEGORIES,
    cookies: Sequence[Any] = (),
    is_phone: bool = False,
) -> Audit:
    """Open a page as the browser of a desktop or phone that has the cookies, and return the report on the categories.

    As a phone, Lighthouse simulates a CPU that is four times slower and a network of 1.6 Mbit/s with a round trip of
    150 ms.

    This function starts the browser: one that Lighthouse starts would not send the cookies with the requests of a
    page's scripts.
    """
    port = free_port()
    command = [
        PROGRAM, url, f"--only-categories={','.join(categories)}", "--disable-full-page-screenshot", "--output=json",
        "--quiet", f"--port={port}", *([] if is_phone else ["--preset=desktop"]),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as profile:
        browser = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=chromium_path(),
            args=[*FLAGS, f"--remote-debugging-port={port}"],
        )
        browser.add_cookies(cookies)
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        browser.close()
    assert done.returncode == 0, done.stderr
    return Audit(json.loads(done.stdout))
