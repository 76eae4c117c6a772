"""An administrator publishes prices in one window, and the customer's next quote in the other has them."""

from decimal import Decimal

from django.utils import translation
from playwright.sync_api import expect

from billing import pricebooks
from billing.models import PriceBook
from tests.browser.conftest import LIVE_SERVER_MARKS, ask_for_quote, in_chinese, log_in, untranslated
from tests.factories.accounts import UserFactory

pytestmark = LIVE_SERVER_MARKS


@in_chinese
def test_prices_that_an_administrator_publishes_are_in_the_next_quote(url, watched, second_page):
    page, say = watched.page, watched.say
    page.goto(f"{url}/training/new/")
    ask_for_quote(page)
    before = int(page.locator("[data-ceiling]").get_attribute("data-ceiling"))

    with translation.override(watched.language):  # its name is in the language of the administrator
        draft = pricebooks.copy(book=PriceBook.objects.get())
    log_in(second_page.context, url, UserFactory(is_staff=True, is_superuser=True))
    second_page.goto(f"{url}/admin/billing/pricebook/{draft.pk}/change/")
    for amount in second_page.locator("input[name$=-amount]:visible").all():
        if value := amount.input_value():  # the last row is for another price
            amount.fill(str(3 * Decimal(value)))
    second_page.get_by_role("button", name=say("Save"), exact=True).click()
    warning = say("Large change from the current price: %(change)s. Check it before you publish.").partition("%")[0]
    expect(second_page.get_by_text(warning).first).to_be_visible()
    second_page.get_by_role("row").filter(has_text=str(draft)).get_by_role("checkbox").check()
    second_page.locator("select[name=action]").select_option("publish")
    assert untranslated(second_page) == []
    second_page.get_by_role("button", name=say("Run")).click()
    assert untranslated(second_page) == []
    second_page.get_by_role("button", name=say("Publish")).click()
    expect(second_page.get_by_text(say("%(book)s is published.", book=draft))).to_be_visible()
    assert untranslated(second_page) == untranslated(page) == []

    ask_for_quote(page)
    expect(page.locator("[data-ceiling]")).not_to_have_attribute("data-ceiling", str(before))
    tripled = int(page.locator("[data-ceiling]").get_attribute("data-ceiling"))
    assert tripled > 2 * before  # about three times; not exactly, since amounts are rounded
