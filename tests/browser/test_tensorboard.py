"""TensorBoard in a real browser, behind the console: a curve is drawn, and its page reaches nothing of the console."""

import os

import pytest
from playwright.sync_api import expect

from jobs import tensorboards
from tests.browser.conftest import log_in
from tests.console.processes import wait_for
from tests.tools import asgi_console, owner_of_tools, write_scalars

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.rerun_if_late("it awaits TensorBoard and a browser, with limits of seconds"),
    pytest.mark.django_db(transaction=True),
]
REACH_OUT = """async (address) => {
    const outcome = async (action) => { try { await action(); return "reached"; } catch (error) { return "refused"; } };
    return [
        await outcome(() => fetch(address)),
        await outcome(() => new Promise((resolve, reject) => {
            const script = Object.assign(document.createElement("script"), {src: address});
            script.onload = resolve; script.onerror = reject; document.head.append(script);
        })),
        await outcome(() => navigator.serviceWorker.register(location.pathname + "index.js")),
        await outcome(() => { if (Function("return 1")()) return; }),
    ];
}"""
"""Tries what a hostile event file could: fetch the console, load it as a script, add a service worker, and `eval`."""
IS_DRAWN = """() => {
    const chart = document.querySelector("scalar-card line-chart canvas");
    const copy = Object.assign(document.createElement("canvas"), {width: chart.width, height: chart.height});
    const context = copy.getContext("2d");
    context.drawImage(chart, 0, 0);
    return context.getImageData(0, 0, copy.width, copy.height).data.some((value) => value > 0);
}"""
"""Says whether the chart has a pixel that is not empty. It copies a canvas of WebGL, which has no `getImageData`."""


@pytest.fixture
def root(short_folders, monkeypatch):
    """The folder by which the console finds the process that starts TensorBoards."""
    folder = short_folders()
    monkeypatch.setattr(tensorboards, "tools_folder", lambda: folder)
    return folder


@pytest.fixture
def url(settings, tmp_path, root, customer):
    """The URL of a console that is served with its static files, beside a process that starts TensorBoards."""
    settings.MIDDLEWARE = ["console.serving.static.StaticMiddleware", *settings.MIDDLEWARE]
    settings.WHITENOISE_USE_FINDERS = True
    settings.STATIC_ROOT = tmp_path
    with owner_of_tools(root), asgi_console() as served:
        yield served


def test_tensorboard_draws_the_curves_of_one_job_and_of_several_but_reaches_nothing_else(url, customer, strict_window):
    runs = []
    for _run in range(2):
        attempt = customer.started()
        logs = customer.backend.run_folder(attempt.run_name) / "run" / "tensorboard"
        write_scalars(logs)
        os.mkfifo(logs / "events.out.tfevents.0")  # opening it would wait for a writer
        runs.append(attempt.job_id)
    log_in(strict_window.page.context, url, customer.membership.user)
    page = strict_window.page
    page.goto(f"{url}/jobs/{runs[0]}/")
    with page.expect_popup() as popup:
        page.get_by_role("button", name="TensorBoard").click()
    board = popup.value
    page.goto("about:blank")  # the job's page would go on refreshing
    errors = []
    board.on("console", lambda message: message.type == "error" and errors.append(message.text))
    expect(board.locator("scalar-card").first).to_be_visible()
    expect(board.locator("scalar-card").first).to_contain_text("loss")
    wait_for(lambda: board.evaluate(IS_DRAWN), seconds=60)
    # TensorBoard requests its fonts from the root of the host, which has none; browsers use others instead.
    assert [error for error in errors if "/font-roboto/" not in error] == []
    assert board.evaluate(REACH_OUT, f"{url}/api/v1/jobs/") == ["refused"] * 4

    page.goto(f"{url}/jobs/")
    for run in runs:
        page.locator(f"#select-{run}").check()
    with page.expect_popup() as popup:
        page.locator(".bulk-bar").get_by_role("button", name="TensorBoard").click()
    page.goto("about:blank")
    for run in runs:
        # Each run's name begins with the number of its job.
        expect(popup.value.locator("runs-data-table")).to_contain_text(f"{run}-")

    page.goto(f"{url}/jobs/")
    for run in runs:
        page.locator(f"#select-{run}").check()
    page.locator(".bulk-bar").get_by_role("button", name="Compare").click()  # asks no question
    expect(page.get_by_role("heading", name="Compare runs")).to_be_visible()
