"""Passkeys in a real browser, kept by Chromium's virtual authenticator."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect
from pytest_django.live_server_helper import LiveServer

from tests.factories.accounts import PASSWORD, MembershipFactory

pytestmark = [
    pytest.mark.browser,
    pytest.mark.late("it awaits a console and a browser, with limits of seconds"),
    pytest.mark.xdist_group("accessibility"),
    pytest.mark.slow,
]


@pytest.fixture
def console(settings, tmp_path):
    """The URL of a console that a thread serves. Browsers allow passkeys at `localhost`, not at 127.0.0.1."""
    settings.MIDDLEWARE = ["whitenoise.middleware.WhiteNoiseMiddleware", *settings.MIDDLEWARE]
    settings.WHITENOISE_USE_FINDERS = True
    settings.STATIC_ROOT = tmp_path
    server = LiveServer("localhost")
    yield server.url
    server.stop()


def add_authenticator(page):
    """Give the browser a device that keeps passkeys and confirms every question."""
    session = page.context.new_cdp_session(page)
    session.send("WebAuthn.enable")
    options = {
        "protocol": "ctap2", "transport": "internal", "hasResidentKey": True, "hasUserVerification": True,
        "isUserVerified": True, "automaticPresenceSimulation": True,
    }  # fmt: skip
    session.send("WebAuthn.addVirtualAuthenticator", {"options": options})


def test_a_passkey_logs_in_alone_or_after_the_password(transactional_db, console, watched):
    user, page = MembershipFactory().user, watched.page
    add_authenticator(page)

    def log_in_with_password():
        page.goto(f"{console}/accounts/login/")
        page.locator("[name=login]").fill(user.email)
        page.locator("[name=password]").fill(PASSWORD)
        page.get_by_role("button", name="Log in", exact=True).click()

    log_in_with_password()
    page.goto(f"{console}/security/")
    page.get_by_role("link", name="Add a passkey").click()
    page.locator("[name=password]").fill(PASSWORD)
    page.get_by_role("button", name="Confirm").click()
    expect(page.get_by_label("Log in with this passkey alone")).to_be_checked()
    page.locator("#id_name").fill("My laptop")
    page.get_by_role("button", name="Add passkey").click()
    expect(page.get_by_role("heading", name="Recovery codes")).to_be_visible()
    page.goto(f"{console}/security/")
    expect(page.get_by_text("My laptop")).to_be_visible()
    expect(page.get_by_text("no password needed")).to_be_visible()

    page.context.clear_cookies()
    log_in_with_password()
    page.get_by_role("button", name="Use a passkey").click()
    page.wait_for_url(f"{console}/")

    page.context.clear_cookies()
    page.goto(f"{console}/accounts/login/?next=/security/")
    page.get_by_role("button", name="Log in with a passkey").click()
    page.wait_for_url(re.compile(r"/security/$"))
    expect(page.get_by_text("Last used: just now")).to_be_visible()
