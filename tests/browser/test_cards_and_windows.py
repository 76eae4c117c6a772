"""A card that is declined and another that pays; and a job that two windows follow at once."""

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import WITH_WHOLE_CONSOLE, in_chinese, open_context, submit_log_in, untranslated
from tests.flows.console import PASSWORD

pytestmark = [*WITH_WHOLE_CONSOLE, pytest.mark.slow]
DECLINED = "4000 0000 0000 0002"
GOOD = "4242 4242 4242 4242"


def log_in(page, url, buyer):
    """Log in on the page that the URL redirects to."""
    page.goto(url)
    submit_log_in(page, buyer.email, PASSWORD)
    page.wait_for_url(url)


@in_chinese
def test_a_declined_card_pays_nothing_and_another_one_does(whole_console, buyer, watched):
    page, say = watched.page, watched.say
    log_in(page, f"{whole_console.url}/wallet/", buyer)
    available = page.locator("[data-available]")
    before = available.inner_text()
    page.get_by_label(say("Amount")).fill("7")
    assert untranslated(page) == []
    page.get_by_role("button", name=say("Go to payment")).click()
    page.get_by_label("Test card number").fill(DECLINED)
    page.get_by_role("button", name="Pay $7.00").click()
    expect(page.get_by_role("alert")).to_have_text("Your card was declined.")
    page.get_by_label("Test card number").fill(GOOD)
    page.get_by_role("button", name="Pay $7.00").click()
    expect(available).not_to_have_text(before)
    expect(page.get_by_role("row").filter(has_text="+US$7.00")).to_have_count(1)
    assert untranslated(page) == []


@in_chinese
def test_two_windows_follow_a_job_and_one_cancels_it(whole_console, buyer, watched, chromium):
    job = buyer.start("windows", nodes=1)
    url = f"{whole_console.url}/jobs/{job}/"
    context = open_context(chromium, language=watched.language)
    pages = [watched.page, context.new_page()]
    for page in pages:
        log_in(page, url, buyer)
        expect(page.locator("#job-header [data-state=running]")).to_be_visible()
        page.get_by_role("tab", name=watched.say("Logs")).click()
        expect(page.locator("#log")).to_contain_text("began 0")
    pages[1].locator("#job-header").get_by_role("button", name=watched.say("Cancel")).click()
    pages[1].get_by_role("dialog").get_by_role("button", name=watched.say("Cancel job")).click()
    for page in pages:
        expect(page.locator("#job-header [data-state=cancelled]")).to_be_visible()
        assert untranslated(page) == []
    context.close()
