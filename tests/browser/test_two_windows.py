"""A job that two windows follow at once, in Chinese."""

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import WITH_WHOLE_CONSOLE, in_chinese, open_context, submit_log_in, untranslated
from tests.flows.console import PASSWORD

pytestmark = [*WITH_WHOLE_CONSOLE, pytest.mark.slow]


@in_chinese
def test_two_windows_follow_a_job_and_one_cancels_it(whole_console, buyer, watched, chromium):
    job = buyer.start("windows", nodes=1)
    url = f"{whole_console.url}/jobs/{job}/"
    context = open_context(chromium, language=watched.language)
    pages = [watched.page, context.new_page()]
    for page in pages:
        page.goto(url)
        submit_log_in(page, buyer.email, PASSWORD)
        page.wait_for_url(url)
        expect(page.locator("#job-header [data-state=running]")).to_be_visible()
        page.get_by_role("tab", name=watched.say("Logs")).click()
        expect(page.locator("#log")).to_contain_text("began 0")  # WAIT's first line
    pages[1].locator("#job-header").get_by_role("button", name=watched.say("Cancel")).click()
    pages[1].get_by_role("dialog").get_by_role("button", name=watched.say("Cancel job")).click()
    for page in pages:
        expect(page.locator("#job-header [data-state=cancelled]")).to_be_visible()
        assert untranslated(page) == []
    context.close()
