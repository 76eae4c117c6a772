"""Ways to log in, in a real browser: a passkey of its virtual authenticator, and a local OpenID Connect provider."""

from __future__ import annotations

import copy
import re
from importlib import import_module

import httpx
import pytest
from playwright.sync_api import expect

from console import sign_in
from tests.browser.conftest import LIVE_SERVER_MARKS, in_chinese, served_console, submit_log_in, untranslated
from tests.factories.accounts import PASSWORD, MembershipFactory

pytestmark = LIVE_SERVER_MARKS


@pytest.fixture
def console(settings, tmp_path):
    """The URL of a served console. Browsers allow passkeys at `localhost`, not at 127.0.0.1."""
    with served_console(settings, tmp_path, host="localhost") as url:
        yield url


def add_authenticator(page):
    """Give the browser a device that keeps passkeys and confirms every question."""
    session = page.context.new_cdp_session(page)
    session.send("WebAuthn.enable")
    options = {
        "protocol": "ctap2", "transport": "internal", "hasResidentKey": True, "hasUserVerification": True,
        "isUserVerified": True, "automaticPresenceSimulation": True,
    }  # fmt: skip
    session.send("WebAuthn.addVirtualAuthenticator", {"options": options})


def log_in_with_password(page, console, user):
    page.goto(f"{console}/accounts/login/")
    submit_log_in(page, user.email, PASSWORD)


@in_chinese
def test_a_passkey_logs_in_alone_or_after_the_password(transactional_db, console, strict_window):
    user, page, say = MembershipFactory().user, strict_window.page, strict_window.say
    add_authenticator(page)

    log_in_with_password(page, console, user)
    page.goto(f"{console}/security/")
    page.get_by_role("link", name=f"{say('Add')} {say('a passkey')}").click()
    assert untranslated(page) == []
    page.locator("[name=password]").fill(PASSWORD)
    page.get_by_role("button", name=say("Confirm")).click()
    expect(page.get_by_label(say("Log in with this passkey alone"))).to_be_checked()
    assert untranslated(page) == []
    page.locator("#id_name").fill("My laptop")
    page.get_by_role("button", name=say("Add passkey")).click()
    expect(page.get_by_role("heading", name=say("Recovery codes"))).to_be_visible()
    assert untranslated(page) == []
    page.goto(f"{console}/security/")
    expect(page.get_by_text("My laptop")).to_be_visible()
    expect(page.get_by_text(say("no password needed"))).to_be_visible()
    assert untranslated(page) == []

    page.context.clear_cookies()
    log_in_with_password(page, console, user)
    page.get_by_role("button", name=say("Use a passkey")).click()
    page.wait_for_url(f"{console}/")

    page.context.clear_cookies()
    page.goto(f"{console}/accounts/login/?next=/security/")
    assert untranslated(page) == []
    page.get_by_role("button", name=say("Log in with a passkey")).click()
    page.wait_for_url(re.compile(r"/security/$"))
    expect(page.get_by_text(f"{say('Last used')}: {say('just now')}")).to_be_visible()


@in_chinese
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the provider uses old names of its own libraries
def test_a_person_logs_in_at_an_openid_provider(transactional_db, console, strict_window, settings):
    page, say = strict_window.page, strict_window.say
    # Imported here: it takes most of a second, which each test process would spend.
    with import_module("oidc_provider_mock").run_server_in_thread() as server:
        provider = f"http://localhost:{server.server_port}"
        httpx.put(f"{provider}/users/ada", json={"email": "ada@example.com", "email_verified": True}).raise_for_status()
        apps = sign_in.parse_oidc_providers(
            f'[{{"id": "acme", "name": "Acme", "server_url": "{provider}", "client_id": "trainyard", '
            '"client_secret": "secret"}]'
        )
        settings.OIDC_PROVIDERS = apps
        policy = copy.deepcopy(settings.CONTENT_SECURITY_POLICY)  # made at startup, so without this provider
        policy["DIRECTIVES"]["form-action"] += sign_in.origins(apps)
        settings.CONTENT_SECURITY_POLICY = policy
        settings.SOCIALACCOUNT_PROVIDERS = {"openid_connect": {"OAUTH_PKCE_ENABLED": True, "APPS": apps}}
        # The provider's page requests a style sheet from the internet, and the browser an icon: the test answers both.
        page.route(re.compile(r"cdn\.jsdelivr\.net|favicon\.ico"), lambda route: route.fulfill(body=""))
        page.goto(f"{console}/accounts/login/?next=/tokens/")
        page.get_by_role("button", name=say("Continue with %(name)s", name="Acme")).click()
        page.wait_for_url(re.compile(re.escape(provider)))
        page.locator("input[name=sub]").first.fill("ada")
        page.get_by_role("button").first.click()
        page.wait_for_url(f"{console}/tokens/")
        page.goto(f"{console}/security/")
        expect(page.get_by_role("heading", name=say("Single sign-on"))).to_be_visible()
        assert untranslated(page) == []
