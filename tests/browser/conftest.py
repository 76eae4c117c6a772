"""Drive a real Chromium. A test fails if the browser reports an error."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field

import pytest
from django.conf import settings
from django.test import Client
from playwright.sync_api import (
    Page,
    expect,
    sync_playwright,
)
from pytest_django.live_server_helper import LiveServer

from tests.conftest import CHROMIUM

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
PATIENCE_MS = 60_000
"""How long a page may take to load or to show something: a limit for a busy machine, which nothing waits for."""


@dataclass
class Watched:
    """A page, and the errors in it."""

    page: Page
    errors: list[str] = field(default_factory=list)
    refused_with: int | None = None
    """A status that the page must meet."""


@pytest.fixture(scope="module")
def chromium():
    """A headless Chromium. It runs an event loop while it is open, which tests of other modules must not meet."""
    with sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, CHROMIUM)))
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        expect.set_options(timeout=PATIENCE_MS)
        yield browser
        browser.close()


@pytest.fixture(scope="module", autouse=True)
def _beside_an_event_loop():
    """Playwright runs an event loop in this thread; Django refuses queries beside one without this variable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        yield


@pytest.fixture
def console(settings, tmp_path):
    """The URL of a console that a thread serves, on the test's own rows."""
    settings.MIDDLEWARE = ["whitenoise.middleware.WhiteNoiseMiddleware", *settings.MIDDLEWARE]
    settings.WHITENOISE_USE_FINDERS = True
    settings.WHITENOISE_MAX_AGE = 3600
    settings.STATIC_ROOT = tmp_path
    server = LiveServer("127.0.0.1")
    yield server.url
    server.stop()


def open_context(browser, **options):
    """Return a new window, in English and as wide as a desktop's."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, locale="en", **options)
    context.set_default_timeout(PATIENCE_MS)
    return context


def session_cookie(url, user):
    """Return the cookie of a new session of the user."""
    client = Client()
    client.force_login(user)
    name = settings.SESSION_COOKIE_NAME
    return {"name": name, "value": client.cookies[name].value, "url": url}


def log_in(context, url, user):
    """Give the window a new session of the user."""
    context.add_cookies([session_cookie(url, user)])


def ask_for_quote(page):
    """Ask for a quote of the form as it is now, and wait until the page shows it; no other quote is pending then."""
    page.evaluate(
        """() => {
            document.activeElement.blur();
            document.querySelectorAll("#quote > *").forEach((element) => element.classList.add("outdated"));
            htmx.trigger("#training", "requote");
        }"""
    )
    expect(page.locator("#quote > [data-quote]:not(.outdated)")).to_be_visible()


@pytest.fixture
def watched(chromium):
    """A new window. It must end without console errors, failed requests and exceptions."""
    context = open_context(chromium)
    page = context.new_page()
    watched = Watched(page)

    def on_console(message):
        # htmx logs a request that a newer one replaces as an error.
        is_replaced = message.text.startswith(("htmx:afterRequest", "htmx:sendAbort"))
        is_refused = f" {watched.refused_with} " in message.text
        if message.type in {"error", "warning"} and not is_replaced and not is_refused:
            watched.errors.append(f"{message.type}: {message.text} {message.location}")

    def on_failure(request):
        # A stream that is closed on purpose, or left with its page, ends as aborted.
        if request.failure != "net::ERR_ABORTED":
            watched.errors.append(f"failed: {request.url} {request.failure}")

    def on_response(response):
        if response.status >= 400 and response.status != watched.refused_with:
            watched.errors.append(f"{response.status}: {response.url}")

    page.on("console", on_console)
    page.on("pageerror", lambda error: watched.errors.append(f"exception: {error}"))
    page.on("requestfailed", on_failure)
    page.on("response", on_response)
    yield watched
    context.close()
    assert watched.errors == []
