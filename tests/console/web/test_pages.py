"""Pages: which roles see them, that no other organization does, and that they obey the content policy."""

import re
from urllib.parse import parse_qs, urlsplit

import pytest
from django.test import Client
from django.urls import reverse

from billing import invoices
from console.accounts import service_accounts
from console.accounts.roles import Capability, Role
from console.accounts.services import is_active
from console.notifications.services import create_webhook
from jobs import results
from storage import retention, selectors
from tests.console.routes import routes_of
from tests.factories.accounts import MembershipFactory
from tests.factories.notebooks import sell_notebook
from tests.factories.storage import DatasetFactory, DatasetVersionFactory, ModelVersionFactory, WorkspaceFactory

VIEW, STORE, RUN, PAY, MANAGE = (
    Capability.VIEW, Capability.STORE, Capability.RUN, Capability.PAY, Capability.MANAGE,
)  # fmt: skip
PAGES = {
    VIEW: {
        "overview": [], "activation": [], "dataset_list": [], "dataset_detail": ["digits"], "workspace_list": [],
        "workspace_imports": [],
        "dataset_version": ["digits", 1], "dataset_folder": ["digits", 1, "raw"],
        "dataset_file": ["digits", 1, "raw/a.csv"], "dataset_download": ["digits", 1, "raw/a.csv"],
        "dataset_image": ["digits", 1, "picture"],
        "model_list": [], "model_detail": ["net"],
        "workspace_detail": ["main"], "workspace_file": ["main", "train.py"],
        "workspace_download": ["main", "train.py"],
        "workspace_search": ["main"], "workspace_bin": ["main"], "storage_usage": [], "image_list": [], "status": [],
        "sweep_list": [], "sweep_detail": ["sweep"], "sweep_importance": ["sweep"],
        "job_list": [], "job_export": [], "job_detail": ["job"], "job_live": ["job"], "job_tab": ["job", "nodes"],
        "job_stacks": ["job", 1], "job_configuration": ["job"], "job_files": ["job"], "job_folder": ["job", "outputs"],
        "job_file": ["job", "outputs/picture"], "job_image": ["job", "outputs/picture"],
        "wallet": [], "receipt_list": [], "receipt_detail": ["receipt"], "cost_list": [], "cost_export": [],
        "credit_list": [], "secret_list": [], "registry_list": [], "organization": [], "tokens": [],
        "notebook_list": [], "job_cost": ["job"], "job_metrics": ["job"], "job_points": ["job"],
        "job_points_csv": ["job"],
    },
    STORE: {"dataset_new": [], "job_publish": ["job"], "workspace_new": [], "image_new": []},
    RUN: {
        "training_new": [], "training_environment": ["quote"], "training_comparison": ["quote"], "sweep_new": [],
        "notebook_extend": ["notebook"], "notebook_new": [],
    },
    PAY: {
        "card_list": [], "invoice_list": [], "invoice_detail": ["invoice"], "invoice_csv": ["invoice"],
        "billing_details": [],
    },
    MANAGE: {
        "audit_log": [], "organization_close": [], "organization_service_accounts": [],
        "organization_service_account": ["robot"], "webhook_list": [], "webhook_detail": ["webhook"],
    },
}  # fmt: skip
"""Pages with their arguments, by what a member needs to open them. Other tests open the pages that are missing here."""
ACTIONS = {
    "activation_deactivate": [], "dataset_delete": ["digits"], "dataset_version_delete": ["digits", 1],
    "dataset_copy": ["digits"], "dataset_import": ["digits"], "dataset_share_new": ["digits"],
    "dataset_share_revoke": ["digits", 1],
    "dataset_share_accept": [], "dataset_share_leave": ["digits"],
    "model_delete": ["net"], "model_version_delete": ["net", 1],
    "storage_restore": ["workspaces", "deleted workspace"], "storage_remove": ["versions", "deleted version"],
    "storage_remove_results": ["job"],
    "workspace_delete": ["main"], "workspace_new_entry": ["main"], "workspace_move": ["main"],
    "workspace_delete_entry": ["main"], "workspace_copy_entry": ["main"], "workspace_existing": ["main"],
    "workspace_bin_empty": ["main"], "workspace_bin_restore": ["main", 1],
    "workspace_bin_remove": ["main", 1], "workspace_save": ["main", "train.py"], "training_quote": [],
    "training_order": [], "training_pay": [], "training_free_estimate": [], "job_cancel": ["job"],
    "sweep_quote": [], "sweep_order": [], "sweep_stop": ["sweep"], "sweep_extend": ["sweep"],
    "notebook_extend_quote": ["notebook"],
    "job_cancel_selected": [], "top_up": [], "card_add": [],
    "card_default": [], "card_remove": [], "automatic_top_up_off": [], "budget_set": [],
    "credit_list": [], "organization_rename": [], "organization_invite": [], "organization_member_role": [1],
    "organization_member_remove": [1], "invitation_revoke": [1], "organization_shells": [],
    "organization_second_factor": [], "organization_close": [], "organization_close_withdraw": [],
    "organization_service_accounts": [], "organization_service_account_state": ["robot"],
    "organization_service_account_delete": ["robot"], "webhook_list": [], "webhook_delete": ["webhook"],
    "webhook_send_again": ["webhook", 1], "secret_list": [], "secret_delete": ["KEY"], "registry_list": [],
    "registry_delete": ["a.example.com"], "image_check": [], "image_edit": ["ours"], "image_delete": ["ours"],
    "invoice_new": [], "job_edit": ["job"], "notebook_quote": [], "notebook_order": [],
    "organization_service_account_token_revoke": ["robot", 1], "workspace_train": ["main", "train.py"],
}  # fmt: skip
"""URL names and arguments of forms that change something, which a viewer may not."""
ELSEWHERE = {
    "job_compare", "jobs_compare", "job_shell", "job_tensorboard", "jobs_tensorboard", "job_view_save",
    "job_view_delete", "notebook_open", "organization_export", "invoice_pdf", "pending_top_up", "tool", "tool_root",
    "training_paid", "training_script", "training_scripts", "workspace_folder", "workspace_picture", "token_revoke",
}  # fmt: skip
"""URL names of an organization's pages whose roles the tests of their features check."""
WITHOUT_ORGANIZATION = {
    "brand_logo", "brand_style", "docs", "docs_page", "legal_text", "invitation", "invitation_accept",
    "invitation_decline", "notebook_admit", "shell_admit", "notification_choices", "notification_list",
    "organization_new", "organization_switch", "security", "security_delete", "security_end_client_access",
    "security_end_session", "security_end_sessions", "security_export", "time_zone",
}  # fmt: skip
"""URL names of pages that are public, or that belong to a person in any role."""
# What the content policy refuses in a page:
HANDLER = re.compile(r"<[^>]+\son[a-z]+\s*=|javascript:|hx-on", re.IGNORECASE)
INLINE_SCRIPT = re.compile(r"<script(?![^>]*\bsrc=)(?![^>]*application/json)[^>]*>", re.IGNORECASE)
INLINE_STYLE = re.compile(r"<style|<[^>]+\sstyle\s*=", re.IGNORECASE)


@pytest.fixture
def address(customer, completed_job, sweeper):
    """`address(name, arguments)` is a page's path; "job", "receipt", "webhook" and the like stand for their ids."""
    version = DatasetVersionFactory(
        dataset=DatasetFactory(organization=completed_job.organization, name="digits"), number=1
    )
    folder = selectors.version_folder(version)
    (folder / "raw").mkdir()
    (folder / "raw" / "a.csv").write_text("x,<b>\n1,2\n")
    outputs = customer.backend.output_folder(results.checkpoint_key(completed_job.pk))
    outputs.mkdir(parents=True, exist_ok=True)
    for place in (folder, outputs):
        (place / "picture").write_bytes(b"GIF89a")
    ModelVersionFactory(model__organization=completed_job.organization, model__name="net")
    invoice = invoices.issue(organization=completed_job.organization)
    assert invoice is not None
    webhook, _secret = create_webhook(membership=customer.membership, url="https://hooks.example.com/")
    workspace = WorkspaceFactory(organization=completed_job.organization, name="discarded")
    retention.delete_workspace(workspace=workspace)
    deleted = DatasetVersionFactory(dataset=version.dataset, number=2)
    retention.delete_version(version=deleted)
    known = {
        "deleted workspace": workspace.pk,
        "deleted version": deleted.pk,
        "job": completed_job.pk,
        "receipt": completed_job.order.hold.receipt.pk,
        "invoice": invoice.pk,
        "sweep": sweeper.buy().pk,
        "notebook": sell_notebook(customer).job_id,
        "quote": customer.quote().pk,
        "robot": service_accounts.create(actor=customer.membership, name="robot", role="member").pk,
        "webhook": webhook.pk,
    }
    return lambda name, arguments: reverse(name, args=[known.get(str(each), each) for each in arguments])


def read(answer):
    return b"".join(answer.streaming_content).decode() if answer.streaming else answer.text


def test_each_role_opens_the_pages_that_it_may_and_no_other(client, customer, browser, address):
    others = [MembershipFactory(role=role, organization=customer.organization) for role in Role if role != Role.OWNER]
    browsers = {member: browser(member) for member in (customer.membership, *others)}
    for capability, pages in PAGES.items():
        for name, arguments in pages.items():
            url = address(name, arguments)
            assert client.get(url)["Location"].startswith(reverse("account_login")), name  # an anonymous visitor
            for member, page in browsers.items():
                answer = page.get(url)
                assert answer.status_code == (200 if member.allows(capability) else 403), (name, member.role)
                if answer.streaming:
                    assert b"".join(answer.streaming_content)
                else:
                    for refused in (HANDLER, INLINE_SCRIPT, INLINE_STYLE):
                        assert not refused.search(answer.text), name


def test_objects_of_another_organization_are_not_found_and_a_role_changes_only_what_it_may(
    stranger, browser, completed_job, address
):
    client, ours = browser(stranger), (completed_job.name, "discarded", "hooks.example.com")
    for name, arguments in (page for pages in PAGES.values() for page in pages.items()):
        answer = client.get(address(name, arguments))
        assert answer.status_code == (404 if arguments else 200), name
        shown = read(answer)  # a stream is read once
        assert not any(each in shown for each in ours), name
    rerun = client.get(reverse("training_new"), {"rerun": completed_job.pk})
    assert rerun.status_code == 200  # it only offers activation
    for name in (
        "job_cancel", "sweep_stop", "dataset_delete", "workspace_delete", "storage_remove_results", "storage_remove",
        "storage_restore", "webhook_delete", "webhook_send_again", "organization_service_account_state",
        "organization_service_account_delete",
    ):  # fmt: skip
        assert client.post(address(name, ACTIONS[name])).status_code == 404, name
    paying = ("top_up", "card_add", "card_default", "card_remove", "automatic_top_up_off", "budget_set", "credit_list")
    managing = (
        "activation_deactivate", "organization_rename", "organization_invite", "invitation_revoke",
        "organization_shells", "organization_close", "organization_close_withdraw", "organization_service_accounts",
        "webhook_list", "organization_second_factor",
    )  # fmt: skip
    refused = {
        Role.VIEWER: ACTIONS,
        Role.MEMBER: (*managing, *paying),
        Role.BILLING: (*managing, "job_cancel", "dataset_delete"),
    }
    for role, names in refused.items():
        client = browser(MembershipFactory(role=role, organization=completed_job.organization))
        for name in names:
            assert client.post(address(name, ACTIONS[name])).status_code == 403, (role, name)


def test_every_page_has_a_rule_about_roles():
    ruled = {*ACTIONS, *ELSEWHERE, *WITHOUT_ORGANIZATION}.union(*PAGES.values())
    assert {pattern.name for _route, pattern in routes_of("console.web.urls")} == ruled


def test_a_form_of_an_ended_session_returns_to_its_page(db, client):
    for referer, page in (
        ("http://testserver/jobs/7/?a=b", "/jobs/7/?a=b"), ("http://elsewhere.example/jobs/7/", "/"), ("", "/"),
    ):  # fmt: skip
        answer = client.post(reverse("job_cancel", args=[7]), headers={"Referer": referer})
        assert (answer.status_code, parse_qs(urlsplit(answer.url).query)) == (302, {"next": [page]}), referer
    for name, arguments in (  # actions of a person rather than of a member
        ("invitation_accept", ["token"]), ("organization_switch", []), ("security_end_session", [1]),
        ("security_end_sessions", []), ("security_end_client_access", ["client"]),
    ):  # fmt: skip
        answer = client.post(reverse(name, args=arguments), headers={"Referer": "http://testserver/security/"})
        assert parse_qs(urlsplit(answer.url).query) == {"next": ["/security/"]}, name


def test_pages_open_before_activation_and_for_a_user_who_creates_an_organization(owner, browser):
    client = browser(owner)
    for name, heading in (
        ("overview", "Overview"), ("wallet", "Wallet"), ("training_new", "New training"), ("sweep_new", "New sweep"),
        ("notebook_new", "New notebook"), ("cost_list", "Costs"), ("invoice_list", "Invoices"),
        ("credit_list", "Credit"), ("card_list", "Cards and automatic top-ups"), ("job_list", "Jobs"),
        ("dataset_list", "Datasets"), ("workspace_list", "Workspaces"), ("activation", "Distributed training"),
    ):  # fmt: skip
        assert f'<h1 class="page-title">{heading}</h1>' in client.get(reverse(name)).text, name
    assert b"Activate the service" in client.get(reverse("overview")).content
    assert b"Accept the terms to activate the service." in client.post(reverse("activation"), {}).content
    assert not is_active(owner.organization)
    client.post(reverse("activation"), {"accept_terms": "on"})
    assert is_active(owner.organization)
    client.post(reverse("activation_deactivate"))
    assert not is_active(owner.organization)
    owner.delete()  # the membership: the person has no organization any more
    assert client.get(reverse("overview"))["Location"] == reverse("organization_new")
    polled = client.get(reverse("job_list"), headers={"HX-Request": "true"})
    assert polled["HX-Redirect"] == reverse("organization_new")
    client.post(reverse("organization_new"), {"name": "Second try"})
    assert b"Second try" in client.get(reverse("overview")).content


PLACEHOLDERS = {"int": "1", "uuid": "8b7e1f5e-3c0a-4d6b-9a55-2f1f0c5d7e11"}
"""Values for the arguments of a path in the test below, by their converter. Other converters get "x"."""


def test_no_page_fails_before_activation(owner, browser):
    client = browser(owner)
    client.raise_request_exception = False
    for route, _entry in routes_of("console.web.urls"):
        path = re.sub(r"<(?:(\w+):)?\w+>", lambda argument: PLACEHOLDERS.get(argument[1], "x"), f"/{route}")
        assert client.get(path).status_code < 500, path
    switched_off = client.post(reverse("automatic_top_up_off"), follow=True)
    assert b"Activate the distributed training service first" in switched_off.content


def test_errors_and_pages_of_the_account_have_the_consoles_frame(client, owner_page):
    for browser in (client, owner_page):
        assert b"This page does not exist" in browser.get("/no/such/page/").content
    assert b"no longer valid" in Client(enforce_csrf_checks=True).post(reverse("account_login"), {}).content
    for name in ("account_login", "account_signup", "account_reset_password"):
        page = client.get(reverse(name)).text
        assert "Never pay more than your cap" in page, name
        for refused in (HANDLER, INLINE_SCRIPT, INLINE_STYLE):
            assert not refused.search(page), name
    for name in ("account_change_password", "account_email", "account_logout"):
        assert b'id="main"' in owner_page.get(reverse(name)).content, name


def test_the_content_policy_allows_no_inline_script_or_style_except_in_the_admin(customer, owner_page):
    for path in ("/", "/no/such/page/", "/accounts/logout/", "/docs/", "/api/v1/docs/", "/api/v1/jobs/"):
        policy = owner_page.get(path)["Content-Security-Policy"]
        assert {"default-src 'self'", "script-src 'self'", "style-src 'self'"} <= set(policy.split("; ")), path
        assert "unsafe" not in policy, path
    customer.membership.user.is_staff = customer.membership.user.is_superuser = True
    customer.membership.user.save()
    (admin, console) = (set(owner_page.get(path)["Content-Security-Policy"].split("; ")) for path in ("/admin/", "/"))
    assert admin - console == {"script-src 'self' 'unsafe-eval'", "style-src 'self' 'unsafe-inline'"}
    assert console - admin == {"script-src 'self'", "style-src 'self'"}


def test_cached_fragments_differ_by_page_role_and_language(customer, browser):
    def sidebar(client, name):
        page = client.get(reverse(name)).text
        return page[page.index('id="sidebar-menu"') : page.index("</aside>")]

    def current(text):
        return re.findall(r'href="([^"]+)" aria-current="page"', text)

    owner = browser(customer.membership)
    viewer = browser(MembershipFactory(organization=customer.organization, role=Role.VIEWER))
    assert current(sidebar(owner, "job_list")) == [reverse("job_list")]
    assert current(sidebar(owner, "receipt_list")) == [reverse("wallet")]
    assert reverse("training_new") in sidebar(owner, "job_list")
    assert reverse("training_new") not in sidebar(viewer, "job_list")
    path = reverse("job_detail", args=[customer.job().pk])
    english = ("Jobs", "Email addresses", "Keep it", "Dark</button>", "Logs</", "Metrics</")
    for language, expected in (("en", True), ("zh-hans", False), ("en", True)):
        page = owner.get(path, headers={"accept-language": language}).text
        assert [words in page for words in english] == [expected] * len(english)
        assert f'class="dropdown-item active" name="language" value="{language}"' in page
