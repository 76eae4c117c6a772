"""An owner invites a member, who joins in a second window and cannot do what the role does not allow."""

from playwright.sync_api import expect

from console.accounts import invitations
from console.accounts.models import Invitation
from tests.browser.conftest import LIVE_SERVER_MARKS, ask_for_quote, in_chinese, untranslated
from tests.factories.accounts import PASSWORD

pytestmark = LIVE_SERVER_MARKS


@in_chinese
def test_an_invited_member_joins_and_cannot_manage_or_pay(url, strict_window, second_page):
    page, say = strict_window.page, strict_window.say
    page.goto(f"{url}/organization/")
    page.locator("[name=email]").fill("grace@example.com")
    page.get_by_role("button", name=say("Send invitation")).click()
    expect(page.get_by_role("row").filter(has_text="grace@example.com")).to_contain_text(say("Member"))

    second_page.goto(f"{url}/invitations/{invitations.token_of(Invitation.objects.get())}/")
    second_page.get_by_role("link", name=say("Create an account to accept")).click()
    second_page.locator("[name=password1]").fill(PASSWORD)
    second_page.locator("[name=password2]").fill(PASSWORD)
    second_page.get_by_role("button", name=say("Create account and join")).click()
    expect(second_page.get_by_role("heading", name=say("Overview"))).to_be_visible()
    second_page.goto(f"{url}/organization/")
    expect(second_page.get_by_role("row").filter(has_text="grace@example.com")).to_contain_text(say("you"))
    expect(second_page.get_by_role("button", name=say("Send invitation"))).to_have_count(0)
    second_page.goto(f"{url}/wallet/")
    expect(second_page.locator("[data-available]")).to_be_visible()
    expect(second_page.get_by_role("button", name=say("Go to payment"))).to_have_count(0)
    assert second_page.goto(f"{url}/invoices/").status == 403
    second_page.goto(f"{url}/training/new/")
    ask_for_quote(second_page)
    expect(second_page.locator("#buy")).to_be_enabled()
    assert untranslated(second_page) == untranslated(page) == []

    page.reload()
    page.get_by_label(say("Role of %(email)s", email="grace@example.com")).select_option("viewer")
    expect(page.get_by_label(say("Role of %(email)s", email="grace@example.com"))).to_have_value("viewer")
    second_page.goto(f"{url}/training/new/")
    expect(second_page.locator("#buy")).to_have_count(0)
