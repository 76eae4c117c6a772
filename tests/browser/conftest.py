"""Drive a real Chromium. A test fails if the browser reports an error."""

from __future__ import annotations

import re
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import pytest
from babel.messages.pofile import read_po
from django.conf import settings
from django.utils import translation
from playwright.sync_api import Page, expect, sync_playwright
from pytest_django.live_server_helper import LiveServer

from tests.conftest import CHROMIUM
from tests.factories.accounts import logged_in
from tests.flows import WHOLE_CONSOLE

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
PATIENCE_MS = 60_000
"""How long a page may take to load or to show something. It takes a second, and longer on a busy machine."""
LIVE_SERVER_MARKS = [
    pytest.mark.browser, pytest.mark.rerun_if_late("it awaits a console and a browser, with limits of seconds"),
    pytest.mark.xdist_group("accessibility"), pytest.mark.slow,
]  # fmt: skip
"""Marks of tests whose console is served from a thread, with the rows that the test created. One process runs them."""
WITH_WHOLE_CONSOLE = [pytest.mark.browser, pytest.mark.torch, *WHOLE_CONSOLE]
"""Marks of tests with all processes of a console, which runs real trainings."""

LOCALES = {"en": "en", "zh-hans": "zh-CN"}
"""The browser's locale for each language of the console."""
in_chinese = pytest.mark.parametrize("language", ["zh-hans"], indirect=True)
"""Marks a flow that runs in Chinese.

No flow runs in both languages, since that would take twice the time; some of them run in Chinese.
`test_every_page_is_translated` opens the console's pages that no flow in Chinese opens.
"""


@dataclass
class StrictWindow:
    """A page, and the errors in it. The fixture `strict_window` fails a test with any."""

    page: Page
    language: str
    errors: list[str] = field(default_factory=list)
    expected_error_status: int | None = None
    """A status of 400 or above that the test expects, so it is not an error."""

    def say(self, text, **values):
        """Return a text of the pages in the language of the browser."""
        with translation.override(self.language):
            return translation.gettext(text) % values if values else translation.gettext(text)


@pytest.fixture(scope="package")
def playwright():
    """Playwright. Its event loop runs in this thread, where Django refuses queries unless the variable allows them."""
    with pytest.MonkeyPatch.context() as patch, sync_playwright() as driver:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        yield driver


@pytest.fixture(scope="package")
def chromium(playwright):
    """A headless Chromium."""
    browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
    expect.set_options(timeout=PATIENCE_MS)
    yield browser
    browser.close()


def chromium_path():
    """Return the path of the installed Chromium."""
    return next(filter(None, map(shutil.which, CHROMIUM)))


@contextmanager
def served_console(settings, static_root, host="127.0.0.1"):
    """Serve a console from a thread, with the rows that the test created. Yield its URL."""
    settings.MIDDLEWARE = ["whitenoise.middleware.WhiteNoiseMiddleware", *settings.MIDDLEWARE]
    settings.WHITENOISE_USE_FINDERS = True
    settings.WHITENOISE_MAX_AGE = 3600
    settings.STATIC_ROOT = static_root
    server = LiveServer(host)
    yield server.url
    server.stop()


@pytest.fixture
def console(settings, tmp_path):
    """The URL of a served console."""
    with served_console(settings, tmp_path) as url:
        yield url


def open_context(browser, *, language="en", **options):
    """Return a new window of a desktop's size. Its browser asks for pages in `language`, a key of LOCALES."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, locale=LOCALES[language], **options)
    context.set_default_timeout(PATIENCE_MS)
    return context


@cache
def english_texts():
    """Return a pattern that matches each text with a Chinese translation, with any value in place of a placeholder."""
    with (settings.BASE_DIR / "locale" / "zh_Hans" / "LC_MESSAGES" / "django.po").open("rb") as file:
        catalogue = read_po(file)
    patterns = []
    for message in catalogue:
        texts = message.id if isinstance(message.id, tuple) else (message.id,)
        translated = message.string if isinstance(message.string, tuple) else (message.string,)
        for text in texts:
            words = re.sub(r"%(\(\w+\))?[sd]", "", text)
            # A single word may be a customer's name for something. A pattern of one word and a value matches too much.
            if text not in translated and len(re.findall(r"[A-Za-z]{2,}", words)) >= 2:
                parts = (re.escape(part) for part in re.split(r"%(?:\(\w+\))?[sd]", text.replace("%%", "%")))
                patterns.append(".+".join(parts))
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


def untranslated(page):
    """Return the lines of a Chinese page that are English although the catalogue has a translation."""
    lines = {line.strip() for line in page.locator("body").inner_text().splitlines()}
    return sorted(line for line in lines if english_texts().fullmatch(line))


def session_cookie(url, user):
    """Return the cookie of a new session of the user."""
    name = settings.SESSION_COOKIE_NAME
    return {"name": name, "value": logged_in(user).cookies[name].value, "url": url}


def submit_log_in(page, email, password):
    """Fill and submit the log-in form that the page shows."""
    page.locator("[name=login]").fill(email)
    page.locator("[name=password]").fill(password)
    page.locator("[name=password]").press("Enter")


def log_in(context, url, user):
    """Give the window a new session of the user."""
    context.add_cookies([session_cookie(url, user)])


def ask_for_quote(page):
    """Ask for a quote of the form as it is now, and wait until the page shows it. No other quote is pending afterwards.

    It leaves the focused field first, which would otherwise request one later.
    """
    page.evaluate(
        """() => {
            document.activeElement.blur();
            document.querySelectorAll("#quote > *").forEach((element) => element.classList.add("outdated"));
            htmx.trigger("#training", "requote");
        }"""
    )
    expect(page.locator("#quote > [data-quote]:not(.outdated)")).to_be_visible()


@pytest.fixture
def language(request):
    """The language of the browser."""
    return getattr(request, "param", "en")


@pytest.fixture
def strict_window(chromium, language):
    """A new window. Its test fails at the end if the page had console errors, failed requests or exceptions."""
    context = open_context(chromium, language=language)
    page = context.new_page()
    window = StrictWindow(page, language)

    def on_console(message):
        # htmx logs a request that a newer one replaces as an error.
        is_replaced = message.text.startswith(("htmx:afterRequest", "htmx:sendAbort"))
        is_expected = f" {window.expected_error_status} " in message.text
        if message.type in {"error", "warning"} and not is_replaced and not is_expected:
            window.errors.append(f"{message.type}: {message.text} {message.location}")

    def on_failure(request):
        # A stream that is closed on purpose, or left with its page, ends as aborted.
        if request.failure != "net::ERR_ABORTED":
            window.errors.append(f"failed: {request.url} {request.failure}")

    def on_response(response):
        if response.status >= 400 and response.status != window.expected_error_status:
            window.errors.append(f"{response.status}: {response.url}")

    page.on("console", on_console)
    page.on("pageerror", lambda error: window.errors.append(f"exception: {error}"))
    page.on("requestfailed", on_failure)
    page.on("response", on_response)
    yield window
    context.close()
    assert window.errors == []


@pytest.fixture
def url(transactional_db, console, customer, strict_window):
    """The URL of a console to which the page of `strict_window` is logged in as the customer."""
    log_in(strict_window.page.context, console, customer.membership.user)
    # The tests' server has no event streams; pages refresh without them.
    strict_window.page.route("**/stream/", lambda route: route.fulfill(content_type="text/event-stream"))
    return console


@pytest.fixture
def second_page(chromium, language):
    """The page of another person's window."""
    context = open_context(chromium, language=language)
    yield context.new_page()
    context.close()
