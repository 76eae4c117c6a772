"""The order form and the editor when the session ends, the quote expires, or an order is under way."""

import re
from urllib.parse import urlsplit

from playwright.sync_api import expect

from tests.browser.conftest import LIVE_SERVER_MARKS, ask_for_quote, submit_log_in
from tests.factories.accounts import PASSWORD

pytestmark = LIVE_SERVER_MARKS
TYPED = {"code_path": "train.py", "arguments": "--model small", "epochs": "7", "lr": "0.05"}


def fill_form(page, url):
    """Open the training form, fill it in, and wait for a quote."""
    page.goto(f"{url}/training/new/")
    for name, value in TYPED.items():
        page.locator(f"#training [name={name}]").fill(value)
    page.locator("#training [name=node_spec][value=medium]").check()
    page.locator("#training [name=nodes]").fill("1")
    ask_for_quote(page)


def log_in_again(page, customer):
    """Log in from the dialog of an ended session, and wait for the page that the log-in returns to."""
    expect(page.get_by_role("dialog")).to_contain_text("You were logged out")
    page.get_by_role("link", name="Log in again").click()
    submit_log_in(page, customer.membership.user.email, PASSWORD)
    expect(page.locator("#main")).to_be_visible()
    page.wait_for_load_state()


def test_the_filled_form_survives_logging_in_again(url, customer, strict_window):
    page = strict_window.page
    # After the quote the page requests a comparison with other nodes and node specs. Here the test answers it, because
    # without the session the server's 401 might open the dialog before the click.
    page.route(re.compile(r"/comparison/"), lambda route: route.fulfill(body=""))
    fill_form(page, url)
    strict_window.expected_error_status = 401
    page.context.clear_cookies(name="sessionid")
    page.locator("#buy").click()
    log_in_again(page, customer)
    for name, value in TYPED.items():
        expect(page.locator(f"#training [name={name}]")).to_have_value(value)
    expect(page.locator("#training [name=node_spec]:checked")).to_have_value("medium")
    expect(page.locator("#buy")).to_be_enabled()


def test_the_text_in_the_editor_survives_logging_in_again(url, customer, strict_window):
    page = strict_window.page
    page.goto(f"{url}/workspaces/w/main/file/train.py")
    page.locator(".CodeMirror").click()
    page.keyboard.press("Control+Home")
    page.keyboard.type("# typed before")
    strict_window.expected_error_status = 401
    page.context.clear_cookies(name="sessionid")
    page.keyboard.press("Control+s")
    log_in_again(page, customer)
    expect(page.locator(".CodeMirror")).to_contain_text("# typed before")
    expect(page.locator("#save-state")).to_have_text("changed, not saved")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#save-state")).to_have_text("Saved.")


def test_an_expired_quote_cannot_be_bought_and_a_quote_being_ordered_is_not_replaced(url, strict_window):
    page = strict_window.page
    page.clock.install()
    fill_form(page, url)
    # A quote is valid for 30 minutes (QUOTE_TTL_SECONDS).
    page.clock.fast_forward("29:00")
    expect(page.locator("#buy")).to_be_enabled()
    page.clock.fast_forward("02:00")
    expect(page.locator("#buy")).to_be_disabled()
    expect(page.get_by_text("This quote has expired.")).to_be_visible()
    page.get_by_role("button", name="Get a new quote").click()
    expect(page.locator("#buy")).to_be_enabled()
    expect(page.get_by_text("This quote has expired.")).to_be_hidden()

    held_routes, requests = [], []

    def hold(route):
        held_routes.append(route)

    page.route("**/training/order/", hold)
    with page.expect_request("**/training/order/"):  # seen here, so it is not in `requests`
        page.locator("#buy").click()
    page.on("request", lambda request: requests.append(urlsplit(request.url).path))
    # A change of the form and a second submission while the order is pending must send nothing. Their requests would be
    # sent before the one below, so once that is seen, they would be in the list.
    page.evaluate("htmx.trigger('#training', 'requote'); htmx.trigger('#order', 'submit')")
    with page.expect_request("**/healthz"):
        page.evaluate("fetch('/healthz')")
    assert not {"/training/quote/", "/training/order/"} & set(requests), "neither another quote nor another order"
    held_routes[0].continue_()
    expect(page).to_have_url(re.compile(r"/jobs/\d+/$"))
