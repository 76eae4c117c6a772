"""A notebook in a real browser: it is bought from a workspace, runs a cell with torch, leaves a file and a receipt."""

import re

import httpx
import pytest
from playwright.sync_api import expect

from tests.browser.conftest import WITH_WHOLE_CONSOLE, submit_log_in
from tests.console.processes import wait_for
from tests.flows.console import PASSWORD

pytestmark = [*WITH_WHOLE_CONSOLE, pytest.mark.slow]
CELL = "import torch; print('sum', int(torch.ones(3).sum()))"


def test_a_notebook_runs_a_cell_with_torch_and_leaves_a_file_and_a_receipt(whole_console, buyer, strict_window):
    page = strict_window.page
    _log_in(page, whole_console.url, buyer.email)
    job = _buy(page, whole_console.url)
    buyer.started.append(job)  # so that a failed test does not leave it open

    page.locator("#open-notebook").wait_for()
    with page.expect_popup() as popup:
        page.locator("#open-notebook").click()
    lab = popup.value
    assert re.fullmatch(rf"http://n{job}\.localhost:{whole_console.port}/lab.*", lab.url)
    lab.locator(".jp-LauncherCard[data-category=Notebook]").first.click()
    expect(lab.get_by_text("Python 3 (ipykernel) | Idle")).to_be_visible()
    cell = lab.locator(".jp-Notebook .cm-content").first
    cell.click()
    lab.keyboard.type(CELL)
    lab.keyboard.press("Shift+Enter")
    expect(lab.locator(".jp-OutputArea-output").first).to_contain_text("sum 3")
    lab.keyboard.press("Control+s")
    lab.locator(".jp-Dialog input").first.fill("first.ipynb")
    lab.get_by_role("button", name="Rename and Save").click()
    wait_for(lambda: "sum 3" in _file(buyer, "first.ipynb"))
    # A page on this origin has no cookie of the console, and cannot read the notebook's own.
    assert lab.evaluate("document.cookie") == ""
    assert [cookie["name"] for cookie in page.context.cookies(lab.url)] == ["notebook"]

    notebook = buyer.call("GET", f"notebooks/{job}/")
    assert notebook["url"] == f"{whole_console.url}/notebooks/{job}/open/"
    buyer.call("POST", f"notebooks/{job}/stop/")
    ended = buyer.ended(job)
    assert (ended["state"], ended["reason"]) == ("cancelled", "cancelled")
    bill = buyer.bill(job)
    assert 0 < bill["total_minor"] <= notebook["ceiling_minor"]
    assert {rule for rule, line in bill["lines"].items() if line["amount_minor"]} <= {"time_used", "minimum"}
    assert "sum 3" in _file(buyer, "first.ipynb")
    lab.reload()
    expect(lab.get_by_role("heading")).to_have_text("This notebook is not open here")
    page.goto(f"{whole_console.url}/notebooks/")
    expect(page.locator(f"a[href='/notebooks/new/?again={job}']")).to_have_text("Resume")


def _log_in(page, url, email):
    page.goto(f"{url}/accounts/login/")
    submit_log_in(page, email, PASSWORD)
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()


def _buy(page, url):
    page.goto(f"{url}/workspaces/")
    page.get_by_role("link", name="main").first.click()
    page.get_by_role("link", name="Open as a notebook").click()
    expect(page.locator("#buy")).to_be_enabled()
    page.locator("#buy").click()
    page.wait_for_url("**/jobs/*/")
    return int(page.url.rstrip("/").rpartition("/")[2])


def _file(buyer, path):
    try:
        return buyer.http.get(f"workspaces/main/files/{path}").text
    except httpx.HTTPError:
        return ""
