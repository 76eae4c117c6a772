"""The main job as a person does it, in a real browser: from sign-up to the receipt of a real two-node run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import ROOT, Watched

pytestmark = [pytest.mark.browser, pytest.mark.torch, pytest.mark.flow, pytest.mark.xdist_group("whole-console")]

PASSWORD = "correct horse battery"
RUN_SECONDS = 180


def test_from_sign_up_to_the_receipt(console_url: str, watched: Watched, tmp_path: Path) -> None:
    page = watched.page
    page.set_default_timeout(20_000)
    _sign_up(console_url, watched)
    _activate(watched)
    _top_up(watched)
    _upload_dataset(watched, tmp_path)
    _upload_script(watched)
    _buy(watched)
    _watch(watched)
    _read_receipt(watched)
    _look_around(console_url, watched)


def _sign_up(url: str, watched: Watched) -> None:
    page = watched.page
    page.goto(url)
    expect(page.get_by_text("The ceiling is never passed")).to_be_visible()
    watched.shot("login")
    page.get_by_role("link", name="Create an account").click()
    page.locator("[name=email]").fill("ada@example.com")
    page.locator("[name=password1]").fill(PASSWORD)
    page.locator("[name=password2]").fill(PASSWORD)
    watched.shot("sign-up")
    page.get_by_role("button", name="Create the account").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    expect(page.get_by_text("From here to the first run")).to_be_visible()
    watched.shot("overview-first")


def _activate(watched: Watched) -> None:
    page = watched.page
    page.get_by_role("link", name="Do it").click()
    page.get_by_role("button", name="Activate the service").click()
    expect(page.get_by_text("Accept the terms to activate the service.")).to_be_visible()
    page.get_by_label("I have read these terms").check()
    watched.shot("activation")
    page.get_by_role("button", name="Activate the service").click()
    expect(page.get_by_text("The service is active.")).to_be_visible()


def _top_up(watched: Watched) -> None:
    page = watched.page
    page.get_by_role("link", name="Wallet", exact=True).first.click()
    page.get_by_role("button", name="20", exact=True).click()
    expect(page.get_by_label("Amount")).to_have_value("20")
    watched.shot("wallet-empty")
    page.get_by_role("button", name="Go to payment").click()
    watched.shot("pay-page")
    page.get_by_role("button", name=re.compile("Pay")).click()
    expect(page.locator("[data-available]")).to_have_text("$20.00", timeout=30_000)
    watched.shot("wallet")


def _upload_dataset(watched: Watched, folder: Path) -> None:
    page = watched.page
    archive = folder / "digits.tar.gz"
    subprocess.run([sys.executable, ROOT / "examples" / "make_digits.py", archive], check=True)
    page.get_by_role("link", name="Datasets").click()
    page.get_by_role("link", name="New dataset").first.click()
    page.get_by_label("Name").fill("Not A Name")
    page.get_by_role("button", name="Create, then upload files").click()
    expect(page.get_by_role("alert").first).to_contain_text("lower-case")
    page.get_by_label("Name").fill("digits")
    page.get_by_role("button", name="Create, then upload files").click()
    page.locator("[data-pick=files]").set_input_files(archive)
    expect(page.get_by_text("v1", exact=True)).to_be_visible()
    watched.shot("dataset")
    several = [{"name": f"part-{n}.txt", "mimeType": "text/plain", "buffer": b"x" * n} for n in (0, 3, 600)]
    page.locator("[data-pick=files]").set_input_files(several)
    expect(page.get_by_text("v2", exact=True)).to_be_visible()
    expect(page.get_by_role("row").nth(1)).to_contain_text("603")
    page.locator("[data-pick=files]").set_input_files(archive)
    expect(page.get_by_text("v3", exact=True)).to_be_visible()


def _upload_script(watched: Watched) -> None:
    page = watched.page
    page.get_by_role("link", name="Workspaces").click()
    page.get_by_role("link", name="main").click()
    page.locator("[data-pick=files]").set_input_files(ROOT / "examples" / "mnist_ddp.py")
    expect(page.get_by_role("link", name="mnist_ddp.py")).to_be_visible()
    watched.shot("workspace")
    _write_a_note(page)
    page.get_by_role("link", name="main", exact=True).click()
    page.get_by_role("link", name="mnist_ddp.py").click()
    expect(page.locator(".CodeMirror")).to_contain_text("DATASETS_PATH")
    watched.shot("editor")


def _write_a_note(page: Page) -> None:
    page.get_by_role("button", name="New", exact=True).click()
    page.locator("#new-name").fill("notes/plan.md")
    page.get_by_role("button", name="File", exact=True).click()
    page.locator(".CodeMirror").click()
    page.keyboard.type("# Plan")
    expect(page.locator("#save-state")).to_have_text("changed, not saved")
    page.keyboard.press("Control+s")
    expect(page.locator("#save-state")).to_have_text("Saved.")
    page.reload()
    expect(page.locator(".CodeMirror")).to_contain_text("# Plan")


def _buy(watched: Watched) -> None:
    page = watched.page
    page.get_by_role("link", name="New training").first.click()
    expect(page.get_by_label("Script")).to_have_value("mnist_ddp.py")  # the only one there is
    page.get_by_label("Script").fill("nowhere.py")
    expect(page.locator("#error-code_path")).to_contain_text("no such file")
    watched.shot("training-unfinished")
    page.get_by_label("Script").fill("mnist_ddp.py")
    page.locator("[data-dataset=digits]").check()
    page.get_by_label("Learning rate").fill("abc")
    expect(page.locator("#error-lr")).to_contain_text("0.01")
    watched.shot("training-error")
    page.get_by_label("Learning rate").fill("0.05")
    page.get_by_label("Epochs").fill("4")
    page.get_by_label("Epochs").blur()
    expect(page.locator("#error-lr")).to_be_empty()
    ceiling = page.locator("[data-ceiling]")
    expect(ceiling).to_be_visible()
    before = ceiling.inner_text()
    page.locator("#max_time").fill("20")
    expect(ceiling).not_to_have_text(before)
    watched.shot("training")
    page.locator("#buy").dblclick()
    page.wait_for_url(re.compile(r"/jobs/\d+/"))
    expect(page.get_by_role("heading", name=re.compile(r"#\d+ mnist_ddp.py"))).to_be_visible()


def _watch(watched: Watched) -> None:
    page = watched.page
    expect(page.locator("#job-header [data-state=running]")).to_be_visible(timeout=RUN_SECONDS * 1000)
    page.get_by_role("tab", name="Logs").click()
    expect(page.locator("#log")).to_contain_text("epoch 1/4", timeout=RUN_SECONDS * 1000)
    watched.shot("job-running-logs")
    page.get_by_role("tab", name="Metrics").click()
    expect(page.locator("#charts .uplot").first).to_be_visible(timeout=RUN_SECONDS * 1000)
    expect(page.locator("#job-header [data-state=succeeded]")).to_be_visible(timeout=RUN_SECONDS * 1000)
    watched.shot("job-metrics")
    page.get_by_role("tab", name="Logs").click()
    page.locator("#log-search").fill("epoch 4/4")
    expect(page.locator("#log mark").first).to_be_visible()
    for tab in ("Overview", "Nodes", "Events", "Cost", "Environment"):
        page.get_by_role("tab", name=tab).click()
        watched.shot(f"job-{tab.lower()}")


def _read_receipt(watched: Watched) -> None:
    page = watched.page
    cost = page.locator("[data-cost]").inner_text()
    page.locator("#receipt-link").click()
    expect(page.locator("[data-total]")).to_have_text(cost)
    expect(page.get_by_text("Node time")).to_be_visible()
    watched.shot("receipt")
    page.get_by_role("link", name="Jobs", exact=True).click()
    expect(page.locator("#job-rows tbody tr")).to_have_count(1)  # the double click bought once
    watched.shot("jobs")


def _look_around(url: str, watched: Watched) -> None:
    """Every other page once, on a desk, on a phone, and in the dark; none is wider than its screen."""
    page = watched.page
    pages = ["", "wallet/", "training/new/?rerun=1", "images/", "images/new/", "organization/", "tokens/", "service/"]
    pages += [
        "jobs/",
        "datasets/",
        "datasets/d/digits/",
        "workspaces/w/main/",
        "accounts/password/change/",
        "accounts/email/",
    ]
    for width, height, scheme in ((1440, 900, "dark"), (390, 844, "light")):
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        for path in [*pages, "jobs/1/"]:
            page.goto(f"{url}/{path}")
            page.wait_for_load_state("load")
            page.wait_for_timeout(150)
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            name = re.sub(r"\W+", "-", path).strip("-") or "overview"
            watched.shot(f"{scheme}-{width}-{name}")
            assert wide <= 0, f"{path} is {wide} pixels wider than a screen of {width}"
