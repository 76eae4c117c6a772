"""Two people in two windows: an owner and an invited member, an administrator and a customer."""

import re
from decimal import Decimal

import pytest
from playwright.sync_api import expect

from billing import pricebooks
from billing.models import PriceBook
from console.accounts import invitations
from console.accounts.models import Invitation
from tests.browser.conftest import ask_for_quote, in_chinese, log_in, open_context, untranslated
from tests.factories.accounts import PASSWORD, UserFactory

pytestmark = [
    pytest.mark.browser,
    pytest.mark.late("it awaits a console and a browser, with limits of seconds"),
    pytest.mark.xdist_group("accessibility"),
    pytest.mark.slow,
]


@pytest.fixture
def second(chromium, language):
    """The page of another person's window."""
    context = open_context(chromium, language=language)
    yield context.new_page()
    context.close()


@in_chinese
def test_an_invited_member_joins_and_cannot_manage_or_pay(transactional_db, console, customer, watched, second):
    page, say = watched.page, watched.say
    log_in(page.context, console, customer.membership.user)
    page.goto(f"{console}/organization/")
    page.locator("[name=email]").fill("grace@example.com")
    page.get_by_role("button", name=say("Send invitation")).click()
    expect(page.get_by_role("row").filter(has_text="grace@example.com")).to_contain_text(say("Member"))

    second.goto(f"{console}/invitations/{invitations.token_of(Invitation.objects.get())}/")
    second.get_by_role("link", name=say("Create an account to accept")).click()
    second.locator("[name=password1]").fill(PASSWORD)
    second.locator("[name=password2]").fill(PASSWORD)
    second.get_by_role("button", name=say("Create account and join")).click()
    expect(second.get_by_role("heading", name=say("Overview"))).to_be_visible()
    second.goto(f"{console}/organization/")
    expect(second.get_by_role("row").filter(has_text="grace@example.com")).to_contain_text(say("you"))
    expect(second.get_by_role("button", name=say("Send invitation"))).to_have_count(0)
    second.goto(f"{console}/wallet/")
    expect(second.locator("[data-available]")).to_be_visible()
    expect(second.get_by_role("button", name=say("Go to payment"))).to_have_count(0)
    assert second.goto(f"{console}/invoices/").status == 403
    second.goto(f"{console}/training/new/")
    ask_for_quote(second)
    expect(second.locator("#buy")).to_be_enabled()
    assert untranslated(second) == untranslated(page) == []

    page.reload()
    page.get_by_label(say("Role of %(email)s", email="grace@example.com")).select_option("viewer")
    expect(page.get_by_label(say("Role of %(email)s", email="grace@example.com"))).to_have_value("viewer")
    second.goto(f"{console}/training/new/")
    expect(second.locator("#buy")).to_have_count(0)


def test_prices_that_an_administrator_publishes_are_in_the_next_quote(
    transactional_db, console, customer, watched, second
):
    page = watched.page
    log_in(page.context, console, customer.membership.user)
    page.goto(f"{console}/training/new/")
    ask_for_quote(page)
    before = int(page.locator("[data-ceiling]").get_attribute("data-ceiling"))

    draft = pricebooks.copy(book=PriceBook.objects.get())
    log_in(second.context, console, UserFactory(is_staff=True, is_superuser=True))
    second.goto(f"{console}/admin/billing/pricebook/{draft.pk}/change/")
    for amount in second.locator("input[name$=-amount]:visible").all():
        if value := amount.input_value():  # the last row is for another price
            amount.fill(str(3 * Decimal(value)))
    second.get_by_role("button", name="Save", exact=True).click()
    expect(second.get_by_text(re.compile("Large change from the current price")).first).to_be_visible()
    second.get_by_role("row").filter(has_text=str(draft)).get_by_role("checkbox").check()
    second.locator("select[name=action]").select_option("publish")
    second.get_by_role("button", name="Run").click()
    second.get_by_role("button", name="Publish").click()
    expect(second.get_by_text(f"{draft} is published.")).to_be_visible()

    ask_for_quote(page)
    expect(page.locator("[data-ceiling]")).not_to_have_attribute("data-ceiling", str(before))
    assert int(page.locator("[data-ceiling]").get_attribute("data-ceiling")) > 2 * before
