"""axe-core finds no violation on any page of the console and the admin, and no page violates its content policy."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from html import unescape
from itertools import chain, product
from pathlib import Path
from typing import Literal
from uuid import UUID

import pytest
from django.conf import settings as django_settings
from django.urls import reverse
from playwright.sync_api import Page, expect

from tests.browser.conftest import LIVE_SERVER_MARKS, english_texts, log_in, open_context
from tests.browser.furnished import HUB_ADDRESS, furnish
from tests.console.routes import routes_of
from tests.factories.jobs import Customer

pytestmark = LIVE_SERVER_MARKS

AXE = (Path(__file__).parent / "vendor" / "axe-core" / "axe.min.js").read_text()
JOB_TABS = ("overview", "logs", "metrics", "telemetry", "nodes", "events", "cost", "configuration", "files")
PAGES = {
    "overview": [""],
    "activation": ["service/"],
    "dataset_list": ["datasets/"],
    "dataset_new": ["datasets/new/"],
    "dataset_detail": ["datasets/d/digits/"],
    "dataset_version": ["datasets/d/digits/v/1/"],
    "dataset_folder": ["datasets/d/digits/v/1/folder/raw"],
    "dataset_file": [f"datasets/d/digits/v/1/file/{name}" for name in ("README.md", "labels.csv", "0.png")],
    "model_list": ["models/"],
    "model_detail": ["models/m/net/"],
    "job_publish": ["jobs/{succeeded}/publish/"],
    "workspace_list": ["workspaces/"],
    "workspace_new": ["workspaces/new/"],
    "workspace_detail": ["workspaces/w/main/"],
    "workspace_folder": ["workspaces/w/main/folder/notes"],
    "workspace_file": ["workspaces/w/main/file/train.py", "workspaces/w/main/file/notes/plot.ipynb"],
    "workspace_search": ["workspaces/w/main/search/?q=p"],
    "workspace_bin": ["workspaces/w/main/bin/"],
    "image_list": ["images/"],
    "image_new": ["images/new/"],
    "image_edit": ["images/i/ours/"],
    "training_new": ["training/new/?rerun={failed}"],
    "status": ["status/"],
    "storage_usage": ["storage/"],
    "job_list": ["jobs/?filters=1"],
    "job_detail": [
        *(f"jobs/{{running}}/#{tab}" for tab in JOB_TABS), "jobs/{succeeded}/#files", "jobs/{hung}/#cost",
        "jobs/{failed}/", "jobs/{check}/", "jobs/{queued}/", "jobs/{notebook}/",
    ],
    "job_shell": ["jobs/{running}/nodes/0/shell/"],
    "notebook_list": ["notebooks/"],
    "notebook_new": ["notebooks/new/?workspace=main"],
    "notebook_extend": ["notebooks/{notebook}/extend/"],
    "sweep_list": ["sweeps/"],
    "sweep_new": ["sweeps/new/?job={succeeded}"],
    "sweep_detail": ["sweeps/{sweep}/"],
    "job_compare": ["jobs/compare/?jobs={running},{succeeded}"],
    "job_cost": ["jobs/{succeeded}/cost/"],
    "job_points": ["jobs/{running}/points/"],
    "job_configuration": ["jobs/{failed}/configuration/"],
    "job_files": ["jobs/{succeeded}/files/"],
    "job_folder": ["jobs/{succeeded}/folder/outputs"],
    "job_file": ["jobs/{succeeded}/file/outputs/report.json", "jobs/{succeeded}/file/outputs/model.pt"],
    "wallet": ["wallet/"],
    "card_list": ["wallet/cards/"],
    "receipt_list": ["receipts/"],
    "receipt_detail": ["receipts/{receipt}/"],
    "credit_list": ["credit/"],
    "cost_list": ["costs/?by=member"],
    "invoice_list": ["invoices/"],
    "invoice_detail": ["invoices/{note}/"],
    "billing_details": ["invoices/details/"],
    "organization": ["organization/"],
    "organization_new": ["organization/new/"],
    "time_zone": ["time-zone/"],
    "security": ["security/"],
    "organization_service_accounts": ["organization/service-accounts/"],
    "organization_service_account": ["organization/service-accounts/{robot}/"],
    "organization_close": ["organization/close/"],
    "security_delete": ["security/delete/"],
    "docs": ["docs/?q=retry"],
    "docs_page": ["docs/errors/"],  # test_docs.py checks what differs between guides
    "audit_log": ["organization/audit/"],
    "secret_list": ["secrets/"],
    "registry_list": ["registries/"],
    "tokens": ["tokens/"],
    "notification_list": ["notifications/"],
    "webhook_list": ["webhooks/"],
    "webhook_detail": ["webhooks/{webhook}/"],
    "legal_text": ["legal/terms/"],
    "invitation": ["invitations/{invitation}/"],
}  # fmt: skip
"""Paths of the console's pages by URL name: one path for each look of a page. A fragment names a tab."""
STATES = (
    "datasets/d/empty/", "training/new/", "training/new/?rerun={failed}&exact=1", "jobs/{succeeded}/#overview",
    "jobs/{succeeded}/#cost", "jobs/{hung}/", "jobs/{queued}/#nodes", "jobs/{notebook}/#configuration",
    "jobs/{running}/cost/",
)  # fmt: skip
"""Pages with other texts than those of PAGES but the same elements: translation is checked in them, not axe."""
NO_TRANSITIONS = """
const sheet = new CSSStyleSheet();
sheet.replaceSync("* { transition: none !important; }");
document.adoptedStyleSheets.push(sheet);
"""
"""Turns transitions off: after a change of theme axe would read colors that are still changing."""
REPEATED_IDS = """() => {
    const ids = [...document.querySelectorAll("[id]")].map((each) => each.id);
    return ids.filter((id, index) => ids.indexOf(id) < index);
}"""
EMPTY_FRAME = """(part) => {
    for (let inner = document.querySelector(part); inner.parentElement; inner = inner.parentElement)
        for (const beside of inner.parentElement.children)
            if (beside !== inner && beside !== document.head && beside.childElementCount) beside.replaceChildren();
}"""
"""Empties everything around a part of the page: axe reads every element, and most are in the navigation around it."""
RUN_AXE = """async ([part, rules, isDark]) => {
    document.documentElement.classList.toggle("dark", isDark);
    return (await axe.run(part, {...rules, resultTypes: ["violations"]})).violations;
}"""
"""Runs axe in a theme. The console follows the system; the admin follows a class once it is loaded."""
TWO_ANIMATION_FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
NARROW = 360
"""Pixels of a narrow phone."""
NOT_PAGES = {
    "brand_logo", "brand_style", "cost_export", "dataset_download", "dataset_image", "dataset_import",
    "image_check", "invoice_csv", "invoice_pdf", "job_export", "job_image", "job_live", "job_metrics",
    "job_points_csv", "job_stacks", "job_tab", "notebook_admit", "notebook_open", "organization_export",
    "security_export", "shell_admit", "sweep_importance", "tool", "tool_root", "top_up", "training_comparison",
    "training_environment", "training_paid", "training_script", "training_scripts", "pending_top_up",
    "workspace_download", "workspace_imports", "workspace_picture",
}  # fmt: skip
"""Names of URLs that answer a GET with a fragment or a file."""
ACCOUNT_PAGES = [
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
"""Pages outside `console.web.urls` that a logged-in person sees: allauth's, those of the OpenID provider, and a 404."""
SIGNED_OUT_PAGES = [
    "accounts/login/", "accounts/approval/", "accounts/signup/", "accounts/password/reset/",
    "accounts/3rdparty/login/cancelled/",
]  # fmt: skip
MAIN = "#main"
"""Selects a page's content. Many pages share the navigation around it, so axe reads WHOLE once for each navigation."""
WHOLE = "html"


@pytest.fixture
def walker(transactional_db, console, backend, provider, chromium):
    """A browser that is logged in to an organization with one of everything."""
    customer = Customer(backend)
    ids = furnish(customer, provider)
    context = open_context(chromium, reduced_motion="reduce")
    context.add_init_script(script=AXE + NO_TRANSITIONS)
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
    theme: Literal["light", "dark"] = "light"

    def read_console(self, message):
        """Collect what the browser says about the page's content policy."""
        if "Content Security Policy" in message.text:
            self.violations.append(f"{self.page.url}: {message.text}")

    def read_error(self, error):
        """Collect an exception of the page's scripts."""
        self.violations.append(f"{self.page.url}: {error}")

    def open(self, path):
        """Load a page, or open another tab of the page that is open, and await what it loads."""
        url, _hash, tab = f"{self.url}/{path.format(**self.ids)}".partition("#")
        if tab and url == self.page.url.partition("#")[0]:
            tabs = self.page.locator("#job-tab")  # on phones, a list in place of the tabs
            tabs.select_option(tab) if tabs.is_visible() else self.page.locator(f"#{tab}-tab").click()
            self.page.evaluate(TWO_ANIMATION_FRAMES)  # htmx loads a tab once an observer has seen it, in the next frame
        else:
            self.page.goto(f"{url}#{tab}" if tab else url, wait_until="load")
        expect(self.page.locator(".htmx-request, [aria-busy=true]")).to_have_count(0)

    def check(self, path, part=MAIN, *, color_themes=2):
        """Run every rule of axe on a part of a page; the slowest, color-contrast, in `color_themes` of two themes."""
        self.open(path)
        if not path.startswith("admin/"):  # the theme of the admin scrolls its wide tables
            self._check_width(path)
        if not self.page.evaluate("document.title && document.querySelector('h1')"):
            self.violations.append(f"/{path}: no title, or no heading of the first level")
        for name in self.page.evaluate(REPEATED_IDS):
            self.violations.append(f"/{path}: several elements have the id {name}")
        if part == MAIN:
            self.page.evaluate(EMPTY_FRAME, part)
        self._run_axe(path, part, {"rules": {"color-contrast": {"enabled": color_themes > 0}}})
        if color_themes == 2:
            self.theme = "light" if self.theme == "dark" else "dark"  # and keep it: each change draws the page again
            self.page.emulate_media(color_scheme=self.theme)
            self._run_axe(path, part, {"runOnly": ["color-contrast"]})

    def _run_axe(self, path, part, rules):
        for violation in self.page.evaluate(RUN_AXE, [part, rules, self.theme == "dark"]):
            for node in violation["nodes"]:
                why = " ".join(node["failureSummary"].split())
                place = f"{node['target']} {node['html'][:120]}"
                self.violations.append(f"/{path} ({self.theme}): {violation['id']}: {place} {why}")

    def _check_width(self, path):
        """Report a page that scrolls sideways on a narrow phone, and elements that stick out."""
        wide = self.page.viewport_size
        self.page.set_viewport_size({"width": NARROW, "height": 800})
        # Charts shrink a moment later, so wait up to 5 s. The page waits itself: a function that Playwright polls needs
        # `eval`, which the page's policy forbids.
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
    for path in chain(*PAGES.values(), ACCOUNT_PAGES):
        walker.check(path, MAIN if path else WHOLE)
    walker.page.context.clear_cookies()
    walker.check(SIGNED_OUT_PAGES[0], WHOLE)
    for path in SIGNED_OUT_PAGES[1:]:
        walker.check(path)
    walker.page.goto(f"{walker.url}/api/v1/docs/")  # Swagger UI is not our code: only its policy is checked
    expect(walker.page.get_by_role("heading", name="Trainyard API")).to_be_visible()
    assert not walker.violations, "\n".join(walker.violations)


def test_every_page_is_translated(client, db, backend, provider):
    customer = Customer(backend)
    ids = furnish(customer, provider)
    client.force_login(customer.membership.user)
    client.cookies[django_settings.LANGUAGE_COOKIE_NAME] = "zh-hans"
    english = {}
    manuals = {*PAGES["docs"], *PAGES["docs_page"]}  # their guides are in English
    for path in {*chain(*PAGES.values(), STATES)} - manuals:
        url = f"/{path.format(**ids)}".replace("#", "?tab=")  # the query asks the server for the tab of a fragment
        lines = texts_of(client.get(url).content.decode())
        if found := sorted(filter(english_texts().fullmatch, lines)):
            english[path] = found
    assert not english


def texts_of(html):
    """Return the texts of a page's elements, without scripts."""
    body = re.sub(r"<script.*?</script>", "", html.partition("<body")[2], flags=re.DOTALL)
    return {" ".join(unescape(text).split()) for text in re.split(r"<[^>]*>", body)}


def test_axe_accepts_the_admin(walker):
    """Check the first page, a list of each app, and the form of each list's first row or of a new one.

    Colors are checked in an app's first list and form alone, and both themes in those of the first app, since all lists
    and all forms have the same style.
    """
    walker.check("admin/", WHOLE)
    lists = sorted(set(filter(re.compile(r"^/admin/\w+/\w+/$").match, walker.links("#nav-sidebar a"))))
    assert len(lists) > 30, "the selector no longer finds the sidebar's links"
    apps = set()
    for path in (each.removeprefix("/") for each in lists):
        app = path.split("/")[1]
        color_themes = 0 if app in apps else 1 if apps else 2
        walker.check(path, color_themes=color_themes) if color_themes else walker.open(path)
        forms = walker.links("#result_list tbody tr:first-child th a") or walker.links("a.addlink")
        if forms:
            walker.check(forms[0].removeprefix("/"), color_themes=color_themes)
        apps.add(app)
    # Other fields than in the form of the first row, whose prices are published and cannot be edited.
    walker.check("admin/billing/pricebook/add/", color_themes=0)
    walker.check("admin/jobs/job/{failed}/page/")
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
        for path in chain(*PAGES.values(), STATES, ACCOUNT_PAGES):
            name = re.sub(r"[^a-z0-9]+", "-", path.format(**walker.ids)).strip("-") or "overview"
            walker.shoot(path, to / f"{name}.png", width=width, theme=theme)


def test_every_url_is_checked_or_is_not_a_page(client, db):
    pages = set()
    for route, pattern in routes_of("console.web.urls"):
        names = re.findall(r"<\w+:(\w+)>", route)
        arguments = {name: UUID(int=0) if name == "quote_id" else "0" for name in names}
        if client.get(reverse(str(pattern.name), kwargs=arguments)).status_code != 405:
            pages.add(pattern.name)  # a GET is allowed; all other URLs are targets of forms
    assert pages - NOT_PAGES == set(PAGES)
