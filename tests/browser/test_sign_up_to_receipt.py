"""A customer's first purchase in a real browser: from sign-up to the receipt of a real run on two nodes, in Chinese."""

import re
import subprocess
import sys
from uuid import uuid4

from playwright.sync_api import expect

from jobs.demo import TEST_CARD
from tests.browser.conftest import WITH_WHOLE_CONSOLE, ask_for_quote, in_chinese, untranslated
from tests.flows.console import PASSWORD, ROOT

pytestmark = WITH_WHOLE_CONSOLE

RUN_SECONDS = 180
"""How long the page may take to show a line of the run or its end."""
DECLINED_CARD = "4000 0000 0000 0002"
"""Stripe's test number of a card that is declined."""
NO_FILE = "This file does not exist in the workspace. Check the path and spelling."
BAD_NAME = "Use 1 to 63 lowercase letters, digits, hyphens and underscores. Start and end with a letter or digit."


@in_chinese
def test_from_sign_up_to_the_receipt(whole_console, strict_window, tmp_path):
    page, say = strict_window.page, strict_window.say
    _sign_up(whole_console.url, page, say)
    assert untranslated(page) == []
    _activate(page, say)
    _top_up(page, say)
    assert untranslated(page) == []
    _upload_dataset(page, say, tmp_path)
    assert untranslated(page) == []
    _upload_script(page, say)
    job = _buy(page, say)
    _watch(page, say)
    assert untranslated(page) == []
    _read_receipt(page, say)
    assert untranslated(page) == []
    _publish(whole_console.url, job, page, say)
    assert untranslated(page) == []


def _sign_up(url, page, say):
    page.goto(url)
    expect(page.get_by_text(say("Never pay more than your cap"))).to_be_visible()
    page.locator("a[href^='/accounts/signup/']").click()
    page.locator("[name=email]").fill(f"ada-{uuid4().hex[:8]}@example.com")
    page.locator("[name=password1]").fill(PASSWORD)
    page.locator("[name=password2]").fill(PASSWORD)
    page.get_by_role("button", name=say("Create account"), exact=True).click()
    expect(page.get_by_role("heading", name=say("Overview"))).to_be_visible()
    expect(page.get_by_role("heading", name=say("Get started"))).to_be_visible()


def _activate(page, say):
    page.get_by_role("link", name=say("Start"), exact=True).click()
    page.get_by_role("button", name=say("Activate the service")).click()
    expect(page.get_by_text(say("Accept the terms to activate the service."))).to_be_visible()
    page.get_by_label(say("I have read these terms and accept them for my organization.")).check()
    page.get_by_role("button", name=say("Activate the service")).click()
    expect(page.get_by_text(say("The service is active. Your wallet and a first workspace are ready."))).to_be_visible()


def _top_up(page, say):
    page.get_by_role("link", name=say("Wallet"), exact=True).first.click()
    page.wait_for_url("**/wallet/")  # the script of the loaded page fills the field
    page.get_by_role("button", name="20", exact=True).click()
    expect(page.get_by_label(say("Amount"))).to_have_value("20")
    page.get_by_role("button", name=say("Go to payment")).click()
    page.get_by_label("Test card number").fill(DECLINED_CARD)
    page.get_by_role("button", name="Pay $20.00").click()
    expect(page.get_by_role("alert")).to_have_text("Your card was declined.")
    page.get_by_label("Test card number").fill(TEST_CARD)
    page.get_by_role("button", name="Pay $20.00").click()
    expect(page.locator("[data-available]")).to_have_text("US$20.00")
    expect(page.get_by_role("row").filter(has_text="+US$20.00")).to_have_count(1)


def _upload_dataset(page, say, folder):
    archive = folder / "digits.tar.gz"
    subprocess.run([sys.executable, ROOT / "examples" / "make_digits.py", archive], check=True)
    page.get_by_role("link", name=say("Datasets"), exact=True).click()
    page.get_by_role("link", name=say("New dataset")).first.click()
    page.locator("#id_name").fill("Not A Name")
    page.get_by_role("button", name=say("Create, then upload files")).click()
    expect(page.get_by_role("alert").first).to_contain_text(say(BAD_NAME))
    page.locator("#id_name").fill("digits")
    page.get_by_role("button", name=say("Create, then upload files")).click()
    page.wait_for_url("**/datasets/d/digits/")  # the script of the loaded page takes the files
    page.locator("[data-pick=files]").set_input_files(archive)
    expect(page.get_by_text("v1", exact=True)).to_be_visible()
    page.wait_for_load_state()
    several = [{"name": f"part-{n}.txt", "mimeType": "text/plain", "buffer": b"x" * n} for n in (0, 3, 600)]
    page.locator("[data-pick=files]").set_input_files(several)
    expect(page.get_by_text("v2", exact=True)).to_be_visible()
    page.wait_for_load_state()
    expect(page.get_by_role("row").nth(1)).to_contain_text("603")  # bytes of the three files
    page.locator("[data-pick=files]").set_input_files(archive)  # again, since the run gets the latest version
    expect(page.get_by_text("v3", exact=True)).to_be_visible()


def _upload_script(page, say):
    page.get_by_role("link", name=say("Workspaces"), exact=True).click()
    page.get_by_role("link", name="main").click()
    page.wait_for_url("**/workspaces/w/main/")
    page.locator("[data-pick=files]").set_input_files(ROOT / "examples" / "mnist_ddp.py")
    expect(page.get_by_role("link", name="mnist_ddp.py")).to_be_visible()
    page.wait_for_load_state()
    _write_a_note(page, say)
    page.get_by_role("link", name="main", exact=True).click()
    page.get_by_role("link", name="mnist_ddp.py").click()
    expect(page.locator(".CodeMirror")).to_contain_text("DATASETS_PATH")


def _write_a_note(page, say):
    page.get_by_role("button", name=say("New"), exact=True).click()
    page.locator("#new-name").fill("notes/plan.md")
    page.get_by_role("button", name=say("File"), exact=True).click()
    page.locator(".CodeMirror").click()
    page.keyboard.type("# Plan")
    expect(page.locator("#save-state")).to_have_text(say("changed, not saved"))
    page.keyboard.press("Control+s")
    expect(page.locator("#save-state")).to_have_text(say("Saved."))
    page.reload()
    expect(page.locator(".CodeMirror")).to_contain_text("# Plan")


def _buy(page, say):
    """Buy a run. Return its job's number."""
    page.get_by_role("link", name=say("New training")).first.click()
    page.wait_for_url("**/training/new/")  # the script of the loaded page notes which fields were typed in
    expect(page.locator("#code_path")).to_have_value("mnist_ddp.py")  # the workspace's only script
    page.locator("#code_path").fill("nowhere.py")
    expect(page.locator("#error-code_path")).to_contain_text(say(NO_FILE))
    page.locator("#code_path").fill("mnist_ddp.py")
    page.locator("[data-dataset=digits]").check()
    page.locator("#lr").fill("abc")
    expect(page.locator("#error-lr")).to_contain_text("0.01")
    page.locator("#lr").fill("0.05")
    page.locator("#epochs").fill("4")
    expect(page.locator("#error-lr")).to_be_empty()
    ask_for_quote(page)
    ceiling = page.locator("[data-ceiling]")
    before = ceiling.inner_text()
    page.locator("#max_time").fill("20")
    expect(ceiling).not_to_have_text(before)
    ask_for_quote(page)  # else leaving the field would request one, and replace the button between the two clicks
    page.locator("#buy").dblclick()
    page.wait_for_url(re.compile(r"/jobs/\d+/"))
    job = page.url.split("/jobs/")[1].split("/")[0]
    expect(page.get_by_role("heading", name=f"#{job} mnist_ddp.py")).to_be_visible()
    return job


def _watch(page, say):
    page.get_by_role("tab", name=say("Logs")).click()
    expect(page.locator("#log")).to_contain_text("epoch 1/4", timeout=RUN_SECONDS * 1000)
    page.get_by_role("tab", name=say("Metrics")).click()
    expect(page.locator("#metrics .uplot").first).to_be_visible(timeout=RUN_SECONDS * 1000)
    expect(page.locator("#job-header [data-state=succeeded]")).to_be_visible(timeout=RUN_SECONDS * 1000)
    page.get_by_role("tab", name=say("Logs")).click()
    page.locator("#log-search").fill("epoch 4/4")
    expect(page.locator("#log mark").first).to_be_visible()
    page.get_by_label(say("Show times")).check()
    expect(page.locator("#log .log-row:has(mark) .log-time").first).to_have_text(re.compile(r"\d\d:\d\d:\d\d\.\d"))
    for tab in ("Overview", "Nodes", "Events", "Cost", "Configuration"):
        page.get_by_role("tab", name=say(tab)).click()
        expect(page.locator(f"#{tab.lower()}")).to_be_visible()


def _read_receipt(page, say):
    cost = page.locator("[data-cost]").inner_text()
    page.locator("#receipt-link").click()
    expect(page.locator("[data-total]")).to_have_text(cost)
    expect(page.get_by_text(say("Node time"))).to_be_visible()
    page.get_by_role("link", name=say("Jobs"), exact=True).click()
    expect(page.locator("#job-rows tbody tr")).to_have_count(1)  # the double click bought once


def _publish(url, job, page, say):
    """Publish the result as a model, and open the form of a training that uses it."""
    page.goto(f"{url}/jobs/{job}/")
    page.locator("#job-header").get_by_role("link", name=say("Publish as a model")).click()
    page.locator("[name=name]").fill("net")
    page.get_by_role("button", name=say("Publish"), exact=True).click()
    expect(page.get_by_role("heading", name=say("How version %(number)s was made", number=1))).to_be_visible()
    page.get_by_role("link", name=say("Use in training")).click()
    page.wait_for_url("**/training/new/**")
    expect(page.locator("#model-net")).to_have_value("net")
