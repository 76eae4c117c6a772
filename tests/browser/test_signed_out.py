"""A session or a quote that ends while its page is open: the page says so, and keeps what was typed."""

import re
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import ask_for_quote
from tests.flows.console import PASSWORD, Buyer

pytestmark = [
    pytest.mark.browser,
    pytest.mark.torch,
    pytest.mark.flow,
    pytest.mark.xdist_group("whole-console"),
    pytest.mark.late("it awaits a console and a browser, with limits of seconds"),
    pytest.mark.cores(2),
    pytest.mark.slow,
]

TYPED = {"code_path": "quick.py", "arguments": "--model small", "epochs": "7", "lr": "0.05"}
SCRIPT = "workspaces/w/main/file/quick.py"
SignIn = Callable[..., None]


@pytest.fixture(scope="module")
def buyer(torch_console):
    """A customer with money in the wallet and a script in the workspace."""
    created = Buyer(torch_console)
    yield created
    created.http.close()


@pytest.fixture
def sign_in(buyer):
    """`sign_in(page, heading)` fills the login page, and waits for the page that it returns to."""

    def fill(page, heading="New training"):
        page.locator("[name=login]").fill(buyer.email)
        page.locator("[name=password]").fill(PASSWORD)
        page.locator("[name=password]").press("Enter")
        expect(page.get_by_role("heading", name=heading)).to_be_visible()
        page.wait_for_load_state()

    return fill


@pytest.fixture
def quoted(watched, sign_in, torch_console):
    """`quoted()` is the training form, signed in and filled until there is a quote."""

    def fill():
        page = watched.page
        page.goto(f"{torch_console.url}/training/new/")
        sign_in(page)
        for name, value in TYPED.items():
            page.locator(f"#training [name={name}]").fill(value)
        page.locator("#training [name=node_spec][value=medium]").check(force=True)
        page.locator("#training [name=nodes]").fill("1")
        ask_for_quote(page)
        return page

    return fill


def test_the_filled_form_is_kept_over_a_new_login(watched, quoted, sign_in):
    # The comparison comes a moment after the quote. Without the session it would open the dialog before the click.
    watched.page.route(re.compile(r"/comparison/"), lambda route: route.fulfill(body=""))
    page = quoted()
    watched.refused_with = 401
    page.context.clear_cookies(name="sessionid")
    page.locator("#buy").click()
    expect(page.get_by_role("dialog")).to_contain_text("You were logged out")
    page.get_by_role("link", name="Log in again").click()
    sign_in(page)
    for name, value in TYPED.items():
        expect(page.locator(f"#training [name={name}]")).to_have_value(value)
    expect(page.locator("#training [name=node_spec]:checked")).to_have_value("medium")
    expect(page.locator("#buy")).to_be_enabled()


def test_the_text_in_the_editor_is_kept_over_a_new_login(watched, sign_in, torch_console):
    page = watched.page
    page.goto(f"{torch_console.url}/{SCRIPT}")
    sign_in(page, "quick.py")
    page.locator(".CodeMirror").click()
    page.keyboard.press("Control+Home")
    page.keyboard.type("# typed before")
    watched.refused_with = 401
    page.context.clear_cookies(name="sessionid")
    page.keyboard.press("Control+s")
    expect(page.get_by_role("dialog")).to_contain_text("You were logged out")
    page.get_by_role("link", name="Log in again").click()
    sign_in(page, "quick.py")
    expect(page.locator(".CodeMirror")).to_contain_text("# typed before")
    expect(page.locator("#save-state")).to_have_text("changed, not saved")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#save-state")).to_have_text("Saved.")


def test_the_quote_stays_while_its_order_is_placed(quoted):
    page = quoted()
    orders = []
    requests = []

    def hold(route):
        orders.append(route)

    page.route("**/training/order/", hold)
    page.locator("#buy").click()
    page.on("request", lambda request: requests.append(urlsplit(request.url).path))
    page.evaluate("htmx.trigger('#training', 'requote'); htmx.trigger('#order', 'submit')")
    with page.expect_request("**/healthz"):
        page.evaluate("fetch('/healthz')")
    assert not {"/training/quote/", "/training/order/"} & set(requests), "neither another quote nor another order"
    orders[0].continue_()
    expect(page).to_have_url(re.compile(r"/jobs/\d+/$"))


def test_an_expired_quote_cannot_be_bought(watched, quoted):
    watched.page.clock.install()
    page = quoted()
    page.clock.fast_forward("29:00")
    expect(page.locator("#buy")).to_be_enabled()
    page.clock.fast_forward("02:00")
    expect(page.locator("#buy")).to_be_disabled()
    expect(page.get_by_text("This quote has expired.")).to_be_visible()
    page.get_by_role("button", name="Get a new quote").click()
    expect(page.locator("#buy")).to_be_enabled()
    expect(page.get_by_text("This quote has expired.")).to_be_hidden()
