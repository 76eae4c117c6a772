"""A sweep in a real browser: it is bought from a job, its page shows the trials as they end, and it is extended."""

import re

import pytest
from playwright.sync_api import expect

from jobs.models import Sweep
from jobs.sweeps import progress
from runtime.specs import Outcome
from tests.browser.conftest import log_in
from tests.browser.test_accessibility import NARROW

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.rerun_if_late("it awaits a browser, with limits of seconds"),
    pytest.mark.django_db(transaction=True),
]


def test_a_sweep_is_bought_and_shown_live(console, sweeper, strict_window):
    customer, page = sweeper.customer, strict_window.page
    job = customer.end(customer.started(arguments="--seed 1"), Outcome.COMPLETED)
    log_in(page.context, console, customer.membership.user)
    page.goto(f"{console}/sweeps/new/")
    page.get_by_role("link", name=f"#{job.pk} ").click()
    page.get_by_role("button", name="Add a parameter").click()
    hidden = page.locator("[data-parameter]").nth(1)
    hidden.get_by_label("Name").fill("--hidden")
    hidden.get_by_label("Type").select_option("categorical")
    expect(hidden.get_by_label("Minimum")).to_be_hidden()
    hidden.get_by_label("Choices, separated by commas").fill("32, 64, 128")
    page.get_by_label("Trials", exact=True).fill("0")
    page.get_by_label("Metric").fill("accuracy")
    expect(page.locator("#error-trials")).not_to_be_empty()
    page.get_by_label("Trials", exact=True).fill("6")  # the importance of parameters, below, needs five
    expect(page.locator("#error-trials")).to_be_empty()
    page.get_by_role("button", name="Buy for at most").click()
    page.wait_for_url(re.compile(r"/sweeps/\d+/$"))

    sweep = Sweep.objects.get()
    progress.advance(sweep_pk=sweep.pk)  # orders as many trials as may run at once
    first, second = sweep.trials.all()
    sweeper.run(first, 0.7)
    progress.advance(sweep_pk=sweep.pk)  # records the trial's value, and orders another
    expect(page.locator("#sweep [data-best]")).to_have_text("0.7")
    sweeper.run(second, 0.8)
    progress.advance(sweep_pk=sweep.pk)
    expect(page.locator("#sweep [data-best]")).to_have_text("0.8")
    expect(page.locator(".parallel path")).to_have_count(2)
    sweeper.finish(sweep)
    expect(page.get_by_text("All trials have ended.")).to_be_visible()
    expect(page.locator(".parallel path")).to_have_count(6)
    expect(page.locator(".parallel .is-best")).to_have_count(1)
    page.reload()
    expect(page.locator("#importance progress")).to_have_count(2)  # the learning rate and --hidden

    page.set_viewport_size({"width": NARROW, "height": 800})
    axis = page.locator(".parallel line").first
    expect(axis).to_have_attribute("x1", "12")  # on a phone each axis is horizontal, from edge to edge
    assert axis.get_attribute("y1") == axis.get_attribute("y2")

    page.locator("#extend").get_by_label("Trials").fill("4")
    page.get_by_role("button", name="Get the price").click()
    page.get_by_role("button", name="Buy for at most").click()
    page.wait_for_url(lambda url: not url.endswith(f"/{sweep.pk}/"))
    assert Sweep.objects.get(extends=sweep).quote.purchase["sweep"]["trials"] == 4
