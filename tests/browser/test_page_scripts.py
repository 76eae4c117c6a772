"""Scripts of the pages in a real browser: the palette, the editor, curves, and the forms of a job and of a training."""

import re

from django.utils import timezone
from playwright.sync_api import expect

from console.accounts.models import User
from console.web.operator_page import TAB_TITLES
from jobs.models import MetricPoint
from runtime.specs import Outcome
from tests.browser.conftest import LIVE_SERVER_MARKS
from tests.browser.test_accessibility import AXE, JOB_TABS, NARROW
from tests.factories.notebooks import sell_notebook

pytestmark = LIVE_SERVER_MARKS


def ended_job(customer, outcome):
    return customer.end(customer.started(), outcome).pk


def violations(page, part):
    page.evaluate(AXE)
    return page.evaluate("(part) => axe.run(part).then((result) => result.violations)", part)


def test_the_palette_is_opened_searched_and_followed_by_keyboard(url, customer, strict_window):
    page, job = strict_window.page, ended_job(customer, Outcome.CODE_FAILED)
    page.goto(f"{url}/jobs/")
    page.keyboard.press("Control+k")
    expect(page.locator(".palette-input")).to_be_focused()
    page.keyboard.type(f"#{job}")
    expect(page.locator("[role=option][aria-selected=true]")).to_contain_text(f"#{job} ")
    assert violations(page, "#palette") == []
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/jobs/{job}/**")
    page.keyboard.press("g")
    page.keyboard.press("d")
    page.wait_for_url("**/datasets/")
    page.keyboard.press("?")
    expect(page.locator("#shortcuts")).to_be_visible()
    page.locator("#single-keys").uncheck()
    page.goto(f"{url}/datasets/")
    page.keyboard.press("?")  # ignored, since keys without Control are off
    page.keyboard.press("Control+k")
    expect(page.locator(".palette-input")).to_be_focused()
    expect(page.locator("#shortcuts")).to_be_hidden()


def test_on_a_phone_the_price_stays_in_sight_and_a_list_replaces_tabs_also_for_operators(url, customer, strict_window):
    page, job = strict_window.page, ended_job(customer, Outcome.COMPLETED)
    page.set_viewport_size({"width": NARROW, "height": 800})
    page.goto(f"{url}/training/new/?rerun={job}")
    expect(page.locator(".quote-bar")).to_contain_text("$")
    expect(page.locator("#buy-bar")).to_be_in_viewport(ratio=1)
    page.locator("#buy-bar").click()
    page.wait_for_url(re.compile(r"/jobs/\d+/"))
    page.goto(f"{url}/jobs/{job}/#overview")
    parts = page.get_by_label("Part of the job")  # a list in place of the tabs, of which none is cut off
    expect(page.get_by_role("tab")).to_have_count(0)
    expect(parts.locator("option")).to_have_count(len(JOB_TABS))
    expect(parts).to_have_value("overview")
    parts.select_option("configuration")
    page.wait_for_url("**/#configuration")
    path = page.locator(".table-names td", has_text="/metrics.jsonl")
    assert path.evaluate("cell => cell.clientHeight") < 50, "the long name is broken into many lines"
    expect(page.locator("#job-header")).to_contain_text("Ended")
    expect(page.locator("#job-header")).not_to_contain_text("Time left")
    page.goto("about:blank")  # else only the fragment would change, and nothing would load
    page.goto(f"{url}/jobs/{job}/#cost")
    expect(page.locator("#cost")).to_be_visible()
    expect(parts).to_have_value("cost")
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW

    User.objects.filter(pk=customer.membership.user_id).update(is_staff=True, is_superuser=True)
    page.goto(f"{url}/admin/jobs/job/{job}/page/")
    parts = page.get_by_label("Part of the job")
    expect(page.locator("#main .nav-link")).to_have_count(len(TAB_TITLES))
    expect(page.locator("#main .nav-link:visible")).to_have_count(0)
    parts.select_option("Events")
    page.wait_for_url(f"**/admin/jobs/job/{job}/page/events/")
    expect(page.locator("#main")).to_contain_text("Ordered")
    expect(parts.locator("option:checked")).to_have_text("Events")
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW


def test_the_page_of_a_notebook_counts_down_and_warns_before_its_time_limit(url, customer, strict_window):
    page, job = strict_window.page, sell_notebook(customer).job_id
    page.clock.install()
    # The server's clock does not move with the browser's, so the header must not be rendered again. htmx ignores a 204.
    page.route("**/live/**", lambda route: route.fulfill(status=204))
    page.goto(f"{url}/jobs/{job}/")
    left, warning = page.locator("[data-seconds-left]"), page.locator("#notebook-ending")
    expect(left).to_have_text(re.compile(r"^[12]:\d\d:\d\d$"))
    expect(warning).to_be_hidden()
    page.clock.fast_forward("01:51:00")  # of two hours; the warning is for the last ten minutes
    expect(left).to_have_text(re.compile(r"^0:0\d:\d\d$"))
    expect(warning).to_be_visible()
    assert violations(page, "#job-header") == []
    warning.get_by_role("link", name="Extend it").click()
    page.wait_for_url(f"**/notebooks/{job}/extend/")


def test_a_new_script_can_be_trained_as_soon_as_it_is_saved(url, customer, strict_window):
    page = strict_window.page
    page.goto(f"{url}/workspaces/w/main/file/new.py?new=1")
    expect(page.get_by_role("link", name="Use in training")).to_be_hidden()
    page.locator(".CodeMirror").click()
    page.keyboard.type("print(1)")
    page.keyboard.press("Control+s")
    page.get_by_role("link", name="Use in training").click()
    page.wait_for_url(re.compile(r"workspace=main&code_path=new\.py$"))


def test_a_conflict_in_the_editor_loses_no_text(url, customer, strict_window):
    page = strict_window.page
    strict_window.expected_error_status = 409
    customer.write("plan.md", "# Plan\n")
    other = page.context.new_page()
    for window, line in ((page, "mine"), (other, "theirs")):
        window.goto(f"{url}/workspaces/w/main/file/plan.md")
        window.locator(".CodeMirror").click()
        window.keyboard.press("Control+End")
        window.keyboard.type(line)
    other.keyboard.press("Control+s")
    expect(other.locator("#save-state")).to_have_text("Saved.")
    page.keyboard.press("Control+s")
    expect(page.locator("#conflict-title")).to_have_text("This file changed after you opened it. Nothing was saved.")
    expect(page.locator(".diff-old")).to_have_text("− theirs")
    expect(page.locator(".diff-new")).to_have_text("+ mine")
    page.get_by_role("button", name="Load the saved version").click()
    expect(page.locator(".CodeMirror-code")).to_contain_text("theirs")
    page.keyboard.press("Control+z")  # undoing the load brings this window's own text back
    expect(page.locator(".CodeMirror-code")).to_contain_text("mine")
    page.keyboard.press("Control+s")
    expect(page.locator("#save-state")).to_have_text("Saved.")
    other.keyboard.type(" again")
    other.keyboard.press("Control+s")
    other.get_by_role("button", name="Save my version over it").click()
    expect(other.locator("#save-state")).to_have_text("Saved.")
    expect(other.locator("#conflict")).to_be_hidden()
    other.reload()
    expect(other.locator(".CodeMirror-code")).to_contain_text("theirs again")


def test_a_job_is_cancelled_while_its_page_refreshes(url, customer, strict_window):
    page = strict_window.page
    page.goto(f"{url}/jobs/{customer.started().job_id}/")
    page.get_by_role("button", name="Cancel", exact=True).click()
    # The refresh replaces the header, and with it the mark `stale`. The open dialog must survive that.
    with page.expect_response(re.compile(r"/live/\?tab=overview")):
        page.locator("#job-header").evaluate("header => (header.dataset.stale = '', htmx.trigger(header, 'refresh'))")
    expect(page.locator("#job-header")).not_to_have_attribute("data-stale", "")
    page.get_by_role("button", name="Cancel job").click()
    expect(page.locator("#job-sentence")).to_have_text(re.compile("^Cancelling. Your code has"))


def test_curves_are_zoomed_by_keyboard_smoothed_and_drawn_along_another_axis(url, customer, strict_window):
    page, job, now = strict_window.page, ended_job(customer, Outcome.COMPLETED), timezone.now()
    MetricPoint.objects.bulk_create(
        MetricPoint(job_id=job, attempt=1, name="loss", position=step, step=step, value=1 / (step + 1), at=now)
        for step in range(50)
    )
    page.goto(f"{url}/jobs/{job}/?tab=metrics")
    loss = page.get_by_role("group", name="Chart of loss.")
    expect(loss.locator(".u-legend")).to_contain_text("loss")
    expect(page.locator(".curves")).to_contain_text("Best 0.02 at step 49")
    loss.press("+")
    page.get_by_role("button", name="Reset zoom").click()
    expect(page.get_by_role("button", name="Reset zoom")).to_be_disabled()
    page.get_by_label("X-axis").select_option("Money spent")
    expect(loss.locator(".u-legend")).to_contain_text("Money spent")
    page.get_by_label("Smoothing").fill("0.5")
    expect(loss.locator(".u-legend")).to_contain_text("loss, smoothed")


def test_a_requirements_file_beside_the_script_is_offered_and_shown(url, customer, strict_window):
    page, job = strict_window.page, ended_job(customer, Outcome.CODE_FAILED)
    customer.write("requirements.txt", "einops\n")
    page.goto(f"{url}/training/new/?rerun={job}")
    page.get_by_role("button", name="Install its packages").click()
    expect(page.locator("#requirements")).to_have_value("requirements.txt")
    expect(page.get_by_role("button", name="Install its packages")).not_to_be_attached()
    page.locator("#buy").click()
    page.wait_for_url(re.compile(r"/jobs/\d+/"))
    expect(page.locator("#job-sentence")).to_contain_text("Installing the packages")
    expect(page.locator("#job-packages")).to_contain_text("einops")
    assert violations(page, "#main") == []
