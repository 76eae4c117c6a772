"""axe-core reports no violation on any page of the console and the admin, and no page violates its content policy."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path
from uuid import UUID

import pytest
from django.conf import settings as django_settings
from django.urls import reverse
from playwright.sync_api import Page, expect

from tests.browser.conftest import log_in, open_context, untranslated
from tests.browser.furnished import HUB_ADDRESS, furnish
from tests.console.routes import routes_of
from tests.factories.jobs import Customer

pytestmark = [
    pytest.mark.browser,
    pytest.mark.late("it awaits a console and a browser, with limits of seconds"),
    pytest.mark.xdist_group("accessibility"),
    pytest.mark.slow,
]

AXE = (Path(__file__).parent / "vendor" / "axe-core" / "axe.min.js").read_text()
JOB_TABS = (
    "overview",
    "logs",
    "metrics",
    "telemetry",
    "nodes",
    "events",
    "cost",
    "configuration",
    "files",
)
PAGES = {
    "overview": [""],
    "activation": ["service/"],
    "dataset_list": ["datasets/"],
    "dataset_new": ["datasets/new/"],
    "dataset_detail": ["datasets/d/digits/", "datasets/d/empty/"],
    "dataset_version": ["datasets/d/digits/v/1/", "datasets/d/digits/v/2/"],
    "dataset_folder": ["datasets/d/digits/v/1/folder/raw"],
    "dataset_file": [
        "datasets/d/digits/v/1/file/README.md", "datasets/d/digits/v/1/file/labels.csv",
        "datasets/d/digits/v/1/file/0.png", "datasets/d/digits/v/1/file/raw/weights.bin",
    ],
    "model_list": ["models/"],
    "model_detail": ["models/m/net/"],
    "job_publish": ["jobs/{succeeded}/publish/"],
    "workspace_list": ["workspaces/"],
    "workspace_new": ["workspaces/new/"],
    "workspace_detail": ["workspaces/w/main/"],
    "workspace_folder": ["workspaces/w/main/folder/notes"],
    "workspace_file": [
        f"workspaces/w/main/file/{name}" for name in ("train.py", "notes/curve.png", "notes/plot.ipynb")
    ],
    "workspace_search": ["workspaces/w/main/search/", "workspaces/w/main/search/?q=p", "workspaces/w/main/search/?q=-"],
    "workspace_bin": ["workspaces/w/main/bin/"],
    "image_list": ["images/"],
    "image_new": ["images/new/"],
    "image_edit": ["images/i/ours/"],
    "training_new": ["training/new/", "training/new/?rerun={failed}", "training/new/?rerun={failed}&exact=1"],
    "status": ["status/"],
    "storage_usage": ["storage/"],
    "job_list": ["jobs/", "jobs/?state=cancelled", "jobs/?tag=none&filters=1"],
    "job_detail": [
        *(f"jobs/{{running}}/#{tab}" for tab in JOB_TABS), "jobs/{succeeded}/#overview", "jobs/{succeeded}/#cost",
        "jobs/{succeeded}/#files",
        "jobs/{failed}/", "jobs/{hung}/", "jobs/{check}/", "jobs/{queued}/", "jobs/{queued}/#nodes",
        "jobs/{notebook}/", "jobs/{notebook}/#configuration",
    ],
    "job_shell": ["jobs/{running}/nodes/0/shell/"],
    "notebook_list": ["notebooks/"],
    "notebook_new": ["notebooks/new/?workspace=main"],
    "notebook_extend": ["notebooks/{notebook}/extend/"],
    "sweep_list": ["sweeps/"],
    "sweep_new": ["sweeps/new/", "sweeps/new/?job={succeeded}"],
    "sweep_detail": ["sweeps/{sweep}/"],
    "job_compare": ["jobs/compare/", "jobs/compare/?jobs={running},{succeeded}"],
    "job_cost": ["jobs/{running}/cost/", "jobs/{succeeded}/cost/"],
    "job_points": ["jobs/{running}/points/"],
    "job_configuration": ["jobs/{failed}/configuration/"],
    "job_files": ["jobs/{succeeded}/files/"],
    "job_folder": ["jobs/{succeeded}/folder/outputs"],
    "job_file": [
        f"jobs/{{succeeded}}/file/outputs/{name}" for name in ("loss.csv", "report.json", "curve.png", "model.pt")
    ],
    "wallet": ["wallet/"],
    "card_list": ["wallet/cards/"],
    "receipt_list": ["receipts/"],
    "receipt_detail": ["receipts/{receipt}/"],
    "credit_list": ["credit/"],
    "cost_list": ["costs/", "costs/?by=member"],
    "invoice_list": ["invoices/"],
    "invoice_detail": ["invoices/{invoice}/", "invoices/{note}/"],
    "billing_details": ["invoices/details/"],
    "organization": ["organization/"],
    "organization_new": ["organization/new/"],
    "time_zone": ["time-zone/"],
    "security": ["security/"],
    "organization_service_accounts": ["organization/service-accounts/"],
    "organization_service_account": ["organization/service-accounts/{robot}/"],
    "organization_close": ["organization/close/"],
    "security_delete": ["security/delete/"],
    "docs": ["docs/", "docs/?q=retry"],
    "docs_page": ["docs/user-guide/", "docs/environment/", "docs/pricing/", "docs/faults/", "docs/errors/"],
    "audit_log": ["organization/audit/", "organization/audit/?area=token&address=192.0.2.1"],
    "secret_list": ["secrets/"],
    "registry_list": ["registries/"],
    "tokens": ["tokens/"],
    "notification_list": ["notifications/"],
    "webhook_list": ["webhooks/"],
    "webhook_detail": ["webhooks/{webhook}/"],
    "legal_text": ["legal/terms/"],
    "invitation": ["invitations/{invitation}/"],
}  # fmt: skip
"""The console's pages by their URL names."""
NO_TRANSITIONS = """
const sheet = new CSSStyleSheet();
sheet.replaceSync("* { transition: none !important; }");
document.adoptedStyleSheets.push(sheet);
"""
NARROW = 360
"""Pixels of a narrow phone."""
NO_PAGES = {
    "brand_logo", "brand_style", "cost_export", "dataset_download", "dataset_image", "dataset_import",
    "image_check", "invoice_csv", "invoice_pdf", "job_export", "job_image", "job_live", "job_metrics",
    "job_points_csv", "job_stacks", "job_tab", "notebook_admit", "notebook_open", "organization_export",
    "security_export", "shell_admit", "sweep_importance", "tool", "tool_root", "top_up", "training_comparison",
    "training_environment", "training_paid", "training_script", "training_scripts", "pending_top_up",
    "workspace_download", "workspace_imports", "workspace_picture",
}  # fmt: skip
"""URLs that answer a GET with a fragment or a file."""
ACCOUNT = [
    "accounts/password/change/",
    "accounts/email/",
    "accounts/3rdparty/",
    "accounts/reauthenticate/",
    (
        f"identity/o/authorize?client_id={{client}}&redirect_uri={HUB_ADDRESS}&response_type=code&scope=openid+notebooks"
        f"&code_challenge={'c' * 43}&code_challenge_method=S256"
    ),
    "identity/o/authorize?client_id=unknown",
    "no/such/page/",
]
SIGNED_OUT = [
    "accounts/login/",
    "accounts/approval/",
    "accounts/signup/",
    "accounts/password/reset/",
    "accounts/3rdparty/login/cancelled/",
]


@pytest.fixture
def walker(transactional_db, console, backend, provider, chromium):
    """A browser that is logged in to an organization with one of everything."""
    customer = Customer(backend)
    ids = furnish(customer, provider)
    context = open_context(chromium, reduced_motion="reduce")
    log_in(context, console, customer.membership.user)
    walker = Walker(context.new_page(), console, ids)
    walker.page.on("console", walker.read_console)
    walker.page.on("pageerror", walker.read_error)
    yield walker
    context.close()


@dataclass
class Walker:
    """Opens pages, and collects what axe reports."""

    page: Page
    url: str
    ids: dict[str, object]
    violations: list[str] = field(default_factory=list)

    def read_console(self, message):
        """Collect what the browser says about the page's content policy."""
        if "Content Security Policy" in message.text:
            self.violations.append(f"{self.page.url}: {message.text}")

    def read_error(self, error):
        """Collect an exception of the page's scripts."""
        self.violations.append(f"{self.page.url}: {error}")

    def open(self, path):
        """Load a page, and await what it loads."""
        url = f"{self.url}/{path.format(**self.ids)}"
        if url.partition("#")[0] == self.page.url.partition("#")[0]:
            self.page.goto("about:blank")  # or the fragment alone would change
        self.page.goto(url, wait_until="load")
        expect(self.page.locator(".htmx-request")).to_have_count(0)

    def check(self, path):
        """Run axe on a page in both themes: every rule in light, and of colors again in dark."""
        self.open(path)
        self.page.evaluate(NO_TRANSITIONS)
        self.page.evaluate(AXE)
        for theme, rules in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
            # The console follows the system; the admin follows a class once it is loaded.
            self.page.emulate_media(color_scheme=theme)
            self.page.evaluate("(dark) => document.documentElement.classList.toggle('dark', dark)", theme == "dark")
            run = "(rules) => axe.run({...rules, resultTypes: ['violations']}).then((result) => result.violations)"
            for violation in self.page.evaluate(run, rules):
                for node in violation["nodes"]:
                    why = " ".join(node["failureSummary"].split())
                    place = f"{node['target']} {node['html'][:120]}"
                    self.violations.append(f"/{path} ({theme}): {violation['id']}: {place} {why}")
        if not path.startswith("admin/"):  # the theme of the admin scrolls its wide tables
            self._check_width(path)

    def _check_width(self, path):
        """Report a page that scrolls sideways on a narrow phone, and elements that stick out."""
        wide = self.page.viewport_size
        self.page.set_viewport_size({"width": NARROW, "height": 800})
        # Charts follow a moment later. A function that Playwright polls needs `eval`, which the page's policy forbids.
        until = f"document.documentElement.scrollWidth <= {NARROW} || performance.now() - started > 5000"
        frames = f"""new Promise((done) => {{
            const started = performance.now();
            const look = () => ({until} ? done(document.documentElement.scrollWidth) : requestAnimationFrame(look));
            look();
        }})"""
        if self.page.evaluate(frames) > NARROW:
            elements = self.page.evaluate(f"""[...document.querySelectorAll('main *, footer *, header *')]
                .filter((each) => each.getBoundingClientRect().right > {NARROW})
                .map((each) => each.outerHTML.slice(0, 120)).slice(0, 3)""")
            self.violations.append(f"/{path}: scrolls sideways at {NARROW} pixels: {elements}")
        self.page.set_viewport_size(wide)

    def shoot(self, path, file, *, width, theme):
        """Save a picture of a page."""
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=theme)
        self.open(path)
        self.page.screenshot(path=file, full_page=True)

    def links(self, selector):
        """Return the targets of the links that a selector matches."""
        return self.page.eval_on_selector_all(selector, "links => links.map((link) => link.pathname)")


def test_axe_accepts_every_page_of_the_console(walker):
    for path in chain(*PAGES.values(), ACCOUNT):
        walker.check(path)
    walker.page.context.clear_cookies()
    for path in SIGNED_OUT:
        walker.check(path)
    walker.page.goto(f"{walker.url}/api/v1/docs/")  # Swagger UI, of others: only its policy is checked
    expect(walker.page.get_by_role("heading", name="Trainyard API")).to_be_visible()
    assert not walker.violations, "\n".join(walker.violations)


def test_every_page_is_translated(walker):
    cookie = {"name": django_settings.LANGUAGE_COOKIE_NAME, "value": "zh-hans", "url": walker.url}
    walker.page.context.add_cookies([cookie])
    english = {}
    # The manuals are in English. Of a page with many looks, the first ones have the texts.
    pages = {name: paths for name, paths in PAGES.items() if name not in {"docs", "docs_page"}}
    for path in chain.from_iterable(paths if name == "job_detail" else paths[:1] for name, paths in pages.items()):
        walker.open(path)
        english[path] = untranslated(walker.page)
    assert not any(english.values()), {path: lines for path, lines in english.items() if lines}


def test_axe_accepts_the_admin(walker):
    """Check the first page, every list, and the form of each list's first row or of a new one."""
    walker.check("admin/")
    lists = sorted(set(filter(re.compile(r"^/admin/\w+/\w+/$").match, walker.links("#nav-sidebar a"))))
    assert len(lists) > 30
    for path in lists:
        walker.check(path.removeprefix("/"))
        forms = walker.links("#result_list tbody tr:first-child th a") or walker.links("a.addlink")
        walker.check((forms[0] if forms else path).removeprefix("/"))
    walker.check("admin/billing/pricebook/add/")
    for job in ("running", "failed"):
        walker.check(f"admin/jobs/job/{{{job}}}/page/")
    assert not walker.violations, "\n".join(walker.violations)


@pytest.mark.skipif("SCREENSHOTS" not in os.environ, reason="make screenshots takes pictures")
@pytest.mark.timeout(3600)
def test_pictures_of_every_page(walker):
    """Save every page in both languages and themes, wide and narrow, to the folder SCREENSHOTS."""
    folder = Path(os.environ["SCREENSHOTS"])
    looks = product(django_settings.LANGUAGES, ("light", "dark"), (1440, 390))
    for (language, _name), theme, width in looks:
        to = folder / language / f"{theme}-{width}"
        to.mkdir(parents=True, exist_ok=True)
        cookie = {"name": django_settings.LANGUAGE_COOKIE_NAME, "value": language, "url": walker.url}
        walker.page.context.add_cookies([cookie])
        for path in chain(*PAGES.values(), ACCOUNT):
            name = re.sub(r"[^a-z0-9]+", "-", path.format(**walker.ids)).strip("-") or "overview"
            walker.shoot(path, to / f"{name}.png", width=width, theme=theme)


def test_the_palette_is_opened_searched_and_followed_by_keyboard(walker):
    page = walker.page
    page.goto(f"{walker.url}/jobs/")
    page.keyboard.press("Control+k")
    expect(page.locator(".palette-input")).to_be_focused()
    page.keyboard.type(f"#{walker.ids['failed']}")
    option = page.locator("[role=option][aria-selected=true]")
    expect(option).to_contain_text(f"#{walker.ids['failed']} ")
    page.evaluate(AXE)
    assert page.evaluate("axe.run('#palette').then((result) => result.violations)") == []
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/jobs/{walker.ids['failed']}/**")
    page.keyboard.press("g")
    page.keyboard.press("d")
    page.wait_for_url("**/datasets/")
    page.keyboard.press("?")
    expect(page.locator("#shortcuts")).to_be_visible()
    page.locator("#single-keys").uncheck()
    page.goto(f"{walker.url}/datasets/")
    page.keyboard.press("?")
    page.keyboard.press("Control+k")
    expect(page.locator(".palette-input")).to_be_focused()
    expect(page.locator("#shortcuts")).to_be_hidden()


@pytest.mark.parametrize("width", [390, 360])
def test_on_a_phone_the_price_stays_in_sight_and_nothing_is_cut_off(walker, width):
    page = walker.page
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(f"{walker.url}/training/new/?rerun={walker.ids['failed']}")
    expect(page.locator(".quote-bar")).to_contain_text("$")
    expect(page.locator("#buy-bar")).to_be_in_viewport(ratio=1)
    page.locator("#buy-bar").click()
    page.wait_for_url(re.compile(r"/jobs/\d+/"))
    page.goto(f"{walker.url}/jobs/{walker.ids['succeeded']}/#configuration")
    for tab in page.get_by_role("tab").all():
        box = tab.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    path = page.locator(".table-names td", has_text="/run/trainyard/metrics.jsonl")
    assert path.evaluate("cell => cell.clientHeight") < 50
    expect(page.locator("#job-header")).to_contain_text("Ended")
    expect(page.locator("#job-header")).not_to_contain_text("Time left")
    page.goto("about:blank")  # or the fragment alone would change
    page.goto(f"{walker.url}/jobs/{walker.ids['succeeded']}/#cost")
    expect(page.locator("#cost")).to_be_visible()
    expect(page.locator("#cost")).not_to_be_focused()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_conflict_in_the_editor_loses_no_text(walker):
    page, customer_file = walker.page, f"{walker.url}/workspaces/w/main/file/notes/plan.md"
    other = page.context.new_page()
    for window, line in ((page, "mine"), (other, "theirs")):
        window.goto(customer_file)
        window.locator(".CodeMirror").click()
        window.keyboard.press("Control+End")
        window.keyboard.type(line)
    other.keyboard.press("Control+s")
    expect(other.locator("#save-state")).to_have_text("Saved.")
    page.keyboard.press("Control+s")
    expect(page.locator("#conflict-title")).to_have_text("This file changed after you opened it. Nothing was saved.")
    expect(page.locator(".diff-old")).to_have_text("− theirs")
    expect(page.locator(".diff-new")).to_have_text("+ mine")
    page.get_by_role("button", name="Load the saved version").click()
    expect(page.locator(".CodeMirror-code")).to_contain_text("theirs")
    page.keyboard.press("Control+z")
    expect(page.locator(".CodeMirror-code")).to_contain_text("mine")
    page.keyboard.press("Control+s")
    expect(page.locator("#save-state")).to_have_text("Saved.")
    other.keyboard.type(" again")
    other.keyboard.press("Control+s")
    other.get_by_role("button", name="Save my version over it").click()
    expect(other.locator("#save-state")).to_have_text("Saved.")
    expect(other.locator("#conflict")).to_be_hidden()
    other.reload()
    expect(other.locator(".CodeMirror-code")).to_contain_text("theirs again")


def test_a_job_is_cancelled_while_its_page_refreshes(walker):
    page = walker.page
    page.goto(f"{walker.url}/jobs/{walker.ids['running']}/")
    page.get_by_role("button", name="Cancel", exact=True).click()
    with page.expect_response(re.compile(r"/live/\?tab=overview")):
        page.locator("#job-header").evaluate("header => (header.dataset.stale = '', htmx.trigger(header, 'refresh'))")
    expect(page.locator("#job-header")).not_to_have_attribute("data-stale", "")
    page.get_by_role("button", name="Cancel job").click()
    expect(page.get_by_text("Cancelling. Your code")).to_be_visible()


def test_curves_are_zoomed_by_keyboard_smoothed_and_drawn_along_another_axis(walker):
    page = walker.page
    page.goto(f"{walker.url}/jobs/{walker.ids['succeeded']}/?tab=metrics")
    loss = page.get_by_role("group", name="Chart of loss.")
    expect(loss.locator(".u-legend")).to_contain_text("loss")
    expect(page.locator(".curves")).to_contain_text("Best 0.02 at step 49")
    loss.press("+")
    page.get_by_role("button", name="Reset zoom").click()
    expect(page.get_by_role("button", name="Reset zoom")).to_be_disabled()
    page.get_by_label("X-axis").select_option("Money spent")
    expect(loss.locator(".u-legend")).to_contain_text("Money spent")
    page.get_by_label("Smoothing").fill("0.5")
    expect(loss.locator(".u-legend")).to_contain_text("loss, smoothed")


def test_every_url_is_checked_or_is_not_a_page(client, db):
    pages = set()
    for route, pattern in routes_of("console.web.urls"):
        names = re.findall(r"<\w+:(\w+)>", route)
        arguments = {name: UUID(int=0) if name == "quote_id" else "0" for name in names}
        if client.get(reverse(str(pattern.name), kwargs=arguments)).status_code != 405:
            pages.add(pattern.name)
    assert pages - NO_PAGES == set(PAGES)


def test_a_requirements_file_beside_the_script_is_offered_and_shown(walker):
    page = walker.page
    page.goto(f"{walker.url}/training/new/?rerun={walker.ids['failed']}")
    page.get_by_role("button", name="Install its packages").click()
    expect(page.locator("#requirements")).to_have_value("requirements.txt")
    expect(page.get_by_role("button", name="Install its packages")).not_to_be_attached()
    page.locator("#buy").click()
    page.wait_for_url(re.compile(r"/jobs/\d+/"))
    expect(page.locator("#job-sentence")).to_contain_text("Installing the packages")
    expect(page.locator("#job-packages")).to_contain_text("einops")
    walker.check(page.url.removeprefix(f"{walker.url}/"))
    assert not walker.violations, "\n".join(walker.violations)
