"""The page of a shell in a real browser: xterm.js works under the page's policy, and axe accepts it."""

import pytest
from playwright.sync_api import expect

from console.accounts import services
from tests.browser.conftest import log_in
from tests.browser.test_accessibility import AXE
from tests.factories.shells import Node
from tests.tools import asgi_console

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]
LINK_AND_CLIPBOARD = b"\x1b]8;;https://evil.example/\x1b\\click here\x1b]8;;\x1b\\ \x1b]52;c;ZXZpbA==\x07<b id=evil>"
"""Hostile output of customers' code: a link, a command that writes the clipboard, and HTML."""


@pytest.fixture
def customer(transactional_db, customer):
    """A customer whose organization allows shells."""
    services.set_shells_enabled(organization=customer.organization, is_enabled=True, actor=customer.membership.user)
    return customer


@pytest.fixture
def url(settings, tmp_path, customer):
    """The URL of a console that is served with its static files."""
    settings.MIDDLEWARE = ["console.serving.static.StaticMiddleware", *settings.MIDDLEWARE]
    settings.WHITENOISE_USE_FINDERS = True
    settings.STATIC_ROOT = tmp_path
    with asgi_console() as served:
        settings.TRAINYARD_URL = served
        yield served


@pytest.fixture
def node(short_folders, customer, monkeypatch):
    """The node of every run. Its shells print LINK_AND_CLIPBOARD."""
    path = short_folders() / "0.shell"
    monkeypatch.setattr(customer.backend, "shell_socket", lambda _name, _node: path)
    with Node(path).running() as listening:
        listening.output = LINK_AND_CLIPBOARD
        yield listening


@pytest.mark.usefixtures("node")
def test_a_shell_is_typed_into_and_shows_customers_data_as_text(customer, url, strict_window):
    job = customer.started()
    page = strict_window.page
    log_in(page.context, url, customer.membership.user)
    page.goto(f"{url}/jobs/{job.job_id}/?tab=nodes")
    with page.expect_popup() as popup:
        page.get_by_role("link", name="Open a shell in node 0").click()
    shell = popup.value
    page.goto("about:blank")  # the page of the job would go on refreshing
    problems = []
    shell.on("console", lambda message: problems.append(message.text))
    shell.on("pageerror", lambda error: problems.append(str(error)))
    shell.reload()  # loaded again with the listeners above, so that no problem is missed
    screen = shell.locator(".xterm-rows")
    expect(screen).to_contain_text("click here")
    expect(screen).to_contain_text("<b id=evil>")
    assert shell.locator("#evil, #shell a").count() == 0
    shell.keyboard.type("hello")
    # The node echoes a frame for each key: `i`, the length, which is not printable, and the key.
    expect(screen).to_contain_text("ihieililio")
    shell.evaluate(AXE)
    violations = shell.evaluate("axe.run().then((result) => result.violations.map((each) => each.id))")
    shell.set_viewport_size({"width": 800, "height": 440})
    shell.keyboard.press("Control+c")
    notice = shell.get_by_role("status").filter(has_text="The shell has ended.")
    # The notice pushes the last line down, yet not out of view.
    for part in (notice, shell.locator(".xterm-rows > div").last):
        expect(part).to_be_in_viewport(ratio=1)
    shell.close()
    assert (violations, problems) == ([], [])
