"""Lighthouse's points for pages of 25 rows, on a desktop and a phone: performance, accessibility, best practices.

make lighthouse bench NAME=lighthouse (QUICK=1 for one round). The target `lighthouse` installs Lighthouse.

The console runs as `manage.py up` serves it. For a desktop, Lighthouse simulates a network of 10 Mbit/s with a
round trip of 40 ms. For a phone, it simulates a network of 1.6 Mbit/s with 150 ms, and a CPU that is four times slower.
Other load on the machine costs points for performance. The findings that cost points are printed for each page.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

from playwright.sync_api import sync_playwright

from bench import rounds
from bench.environment import free_console_port, images_root, temporary_installation
from bench.pages import create_customer, page_paths, serve_console

ROUNDS = 1 if rounds.is_quick() else 3
GOAL = 95
"""Points for performance that each page should have."""
PHONE_GOAL = 90
"""The same on a phone. Its slow CPU and network leave less room."""
PAGES = ("overview", "job_detail", "training_new")
"""Pages of a customer; the log-in page is for everyone."""
PHONE_PAGES = ("log_in", "training_new")
"""Pages that are measured as a phone shows them, too."""


def main() -> None:
    """Measure, then print the table and the JSON object."""
    url = f"http://127.0.0.1:{free_console_port()}"
    with temporary_installation(TRAINYARD_URL=url, TRAINYARD_IMAGES_ROOT=str(images_root())):
        figures = rounds.summaries(measure(url))
    rounds.print_table("points of 100", figures)
    ratios = {
        name: round(figures[name]["median"] / (PHONE_GOAL if name.endswith("phone") else GOAL), 3)
        for name in figures
        if name.startswith("performance")
    }
    rounds.print_result("lighthouse", figures, ratios)


def measure(url: str) -> dict[str, list[float]]:
    """Return the points of each round, by category and page."""
    from django.core.management import call_command  # noqa: PLC0415 - Django must be set up first
    from django.urls import reverse  # noqa: PLC0415 - as above

    from tests.browser import lighthouse  # noqa: PLC0415 - as above
    from tests.browser.conftest import session_cookie  # noqa: PLC0415 - as above

    if not lighthouse.is_installed():
        raise SystemExit(lighthouse.NOT_INSTALLED)
    call_command("collectstatic", interactive=False, verbosity=0)
    customer = create_customer(Path(os.environ["TRAINYARD_VAR"]))
    session = session_cookie(url, customer.membership.user)
    paths = page_paths(customer)
    visits = {"log_in": (reverse("account_login"), [])} | {page: (paths[page], [session]) for page in PAGES}
    # For each audit: the name in the figures, the page, and whether it is shown as on a phone.
    audits = [(page, page, False) for page in visits] + [(f"{page} phone", page, True) for page in PHONE_PAGES]
    points = defaultdict(list)
    with serve_console(url), sync_playwright() as playwright:
        for number in range(ROUNDS):
            for name, page, is_phone in audits:
                path, cookies = visits[page]
                audit = lighthouse.audit(playwright, f"{url}{path}", cookies=cookies, is_phone=is_phone)
                for category, score in audit.scores.items():
                    points[f"{category} {name}"].append(float(score))
                    for fault in audit.faults(category):
                        print(f"round {number + 1} {name}: {fault[:300]}", flush=True)
    return dict(points)


if __name__ == "__main__":
    main()
