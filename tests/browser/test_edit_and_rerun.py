"""A script is edited after its run, and the run is bought again: with the edited script, and exactly as it was."""

import re

from playwright.sync_api import expect

from runtime.specs import Outcome
from tests.browser.conftest import LIVE_SERVER_MARKS, in_chinese, untranslated
from tests.factories.jobs import start

pytestmark = LIVE_SERVER_MARKS


@in_chinese
def test_a_job_is_bought_again_with_the_edited_script_and_exactly_as_it_was(url, customer, strict_window):
    page, say = strict_window.page, strict_window.say
    customer.write("train.py", "print('first')\n")
    first = customer.started()
    customer.end(first, Outcome.CODE_FAILED)
    page.goto(f"{url}/workspaces/w/main/file/train.py")
    page.locator(".CodeMirror").click()
    page.keyboard.press("Control+End")
    page.keyboard.type("print('second')")
    page.keyboard.press("Control+s")
    expect(page.locator("#save-state")).to_have_text(say("Saved."))

    page.goto(f"{url}/jobs/{first.job_id}/#configuration")
    expect(page.locator("#script-diff .diff-new")).to_contain_text("print('second')")
    assert untranslated(page) == []
    page.get_by_role("link", name=say("Run again"), exact=True).click()
    expect(page.get_by_text(say("The script %(path)s has changed.", path="train.py"))).to_be_visible()
    page.locator("[name=epochs]").fill("7")
    expect(page.locator("#changed-fields output")).to_have_text(say("Epochs"))
    assert untranslated(page) == []
    assert script_of_started_job(customer, buy(page)) == "print('first')\nprint('second')"

    page.goto(f"{url}/jobs/{first.job_id}/")
    page.get_by_role("link", name=say("Run exactly")).click()
    assert script_of_started_job(customer, buy(page)) == "print('first')"
    page.reload()
    page.get_by_role("tab", name=say("Configuration")).click()
    sentence = say("This job runs a copy of the ordered script, %(path)s in the workspace.", path="PATH")
    before_path = sentence.partition("PATH")[0].strip()  # the path of the copy is generated
    expect(page.locator("#configuration")).to_contain_text(before_path)
    assert untranslated(page) == []


def buy(page):
    """Buy what the form shows, and return the job's number."""
    page.locator("#buy").click()
    page.wait_for_url(re.compile(r"/jobs/\d+/"))
    return int(re.search(r"/jobs/(\d+)/", page.url)[1])


def script_of_started_job(customer, job):
    """Start a job, and return the text of the script that the cluster gets."""
    started = customer.organization.jobs.get(pk=job)
    assert start(started)
    return (customer.folder / customer.backend.runs[f"job-{job}-1"].spec.script).read_text().strip()
