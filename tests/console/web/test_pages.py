"""Every page: who sees it, that no other tenant does, and that nothing in it needs a looser content policy."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from django.test import Client
from django.urls import reverse

from billing import invoices
from console.accounts.models import Membership
from console.accounts.roles import Capability, Role
from jobs.models import Job
from storage import catalog
from tests.factories.accounts import MembershipFactory
from tests.factories.jobs import Customer
from tests.factories.storage import DatasetVersionFactory

PAGES: list[tuple[str, list[object], Capability]] = [
    ("overview", [], Capability.VIEW),
    ("activation", [], Capability.VIEW),
    ("dataset_list", [], Capability.VIEW),
    ("dataset_new", [], Capability.STORE),
    ("dataset_detail", ["digits"], Capability.VIEW),
    ("workspace_list", [], Capability.VIEW),
    ("workspace_new", [], Capability.STORE),
    ("workspace_detail", ["main"], Capability.VIEW),
    ("workspace_file", ["main", "train.py"], Capability.VIEW),
    ("workspace_download", ["main", "train.py"], Capability.VIEW),
    ("image_list", [], Capability.VIEW),
    ("image_new", [], Capability.STORE),
    ("training_new", [], Capability.RUN),
    ("status", [], Capability.VIEW),
    ("job_list", [], Capability.VIEW),
    ("job_detail", ["job"], Capability.VIEW),
    ("job_live", ["job"], Capability.VIEW),
    ("wallet", [], Capability.VIEW),
    ("card_list", [], Capability.PAY),
    ("receipt_list", [], Capability.VIEW),
    ("receipt_detail", ["receipt"], Capability.VIEW),
    ("cost_list", [], Capability.VIEW),
    ("cost_export", [], Capability.VIEW),
    ("credit_list", [], Capability.VIEW),
    ("invoice_list", [], Capability.PAY),
    ("invoice_detail", ["invoice"], Capability.PAY),
    ("invoice_csv", ["invoice"], Capability.PAY),
    ("billing_details", [], Capability.PAY),
    ("organization", [], Capability.VIEW),
    ("tokens", [], Capability.VIEW),
]
HANDLER = re.compile(r"<[^>]+\son[a-z]+\s*=|javascript:|hx-on", re.IGNORECASE)
INLINE_SCRIPT = re.compile(r"<script(?![^>]*\bsrc=)(?![^>]*application/json)[^>]*>", re.IGNORECASE)


def _address(name: str, arguments: list[object], job: Job) -> str:
    receipt = job.order.hold.receipt
    made = invoices.issue(organization=job.organization) or receipt.invoice_line.invoice
    known = {"job": job.pk, "receipt": receipt.pk, "invoice": made.pk}
    return reverse(name, args=[known.get(str(each), each) for each in arguments])


@pytest.fixture
def dataset(customer: Customer) -> None:
    made = catalog.create_dataset(
        organization=customer.organization, user=customer.membership.user, name="digits", description="Some digits"
    )
    DatasetVersionFactory(dataset=made)


@pytest.mark.usefixtures("dataset")
def test_each_role_sees_what_it_may(any_member: Membership, browser: Callable[[Membership], Client], done: Job) -> None:
    client = browser(any_member)
    for name, arguments, capability in PAGES:
        answer = client.get(_address(name, arguments, done))
        assert answer.status_code == (200 if any_member.allows(capability) else 403), name
        if answer.streaming:
            assert b"".join(answer.streaming_content)
        else:
            assert not HANDLER.search(answer.content.decode()), name
            assert not INLINE_SCRIPT.search(answer.content.decode()), name


@pytest.mark.usefixtures("dataset")
def test_strangers_log_in_first(done: Job, client: Client) -> None:
    for name, arguments, _capability in PAGES:
        answer = client.get(_address(name, arguments, done))
        assert answer.status_code == 302, name
        assert answer["Location"].startswith(reverse("account_login")), name


@pytest.mark.usefixtures("dataset")
def test_another_organization_finds_nothing(
    stranger: Membership, browser: Callable[[Membership], Client], done: Job
) -> None:
    client = browser(stranger)
    for name, arguments, _capability in PAGES:
        if arguments:
            assert client.get(_address(name, arguments, done)).status_code == 404, name
    assert client.get(reverse("training_new"), {"rerun": done.pk}).status_code == 200  # its service is not active
    assert client.post(reverse("job_cancel", args=[done.pk])).status_code == 404
    assert client.post(reverse("dataset_delete", args=["digits"])).status_code == 404
    assert client.post(reverse("workspace_delete", args=["main"])).status_code == 404


@pytest.mark.usefixtures("dataset")
def test_a_viewer_changes_nothing(customer: Customer, browser: Callable[[Membership], Client], done: Job) -> None:
    client = browser(MembershipFactory(role=Role.VIEWER, organization=customer.organization))
    posts: list[tuple[str, list[object]]] = [
        ("activation_deactivate", []),
        ("dataset_delete", ["digits"]),
        ("workspace_delete", ["main"]),
        ("workspace_new_entry", ["main"]),
        ("workspace_move", ["main"]),
        ("workspace_delete_entry", ["main"]),
        ("workspace_save", ["main", "train.py"]),
        ("training_quote", []),
        ("training_order", []),
        ("job_cancel", [done.pk]),
        ("top_up", []),
        ("organization_rename", []),
        ("organization_member_add", []),
        ("organization_member_role", [customer.membership.pk]),
        ("organization_member_remove", [customer.membership.pk]),
    ]
    for name, arguments in posts:
        assert client.post(reverse(name, args=arguments)).status_code == 403, name


def test_pages_before_activation(owner: Membership, browser: Callable[[Membership], Client]) -> None:
    client = browser(owner)
    for name in ("overview", "wallet", "training_new", "job_list", "dataset_list", "workspace_list", "activation"):
        assert client.get(reverse(name)).status_code == 200, name
    assert b"Activate the service" in client.get(reverse("overview")).content


def test_a_person_without_an_organization_makes_one(owner: Membership, browser: Callable[[Membership], Client]) -> None:
    client = browser(owner)
    owner.delete()
    assert client.get(reverse("overview"))["Location"] == reverse("organization_new")
    client.post(reverse("organization_new"), {"name": "Second try"})
    assert b"Second try" in client.get(reverse("overview")).content


def test_error_pages(client: Client, owner_page: Client) -> None:
    assert b"There is nothing here" in owner_page.get("/no/such/page/").content
    assert b"There is nothing here" in client.get("/no/such/page/").content
    strict = Client(enforce_csrf_checks=True)
    assert b"no longer valid" in strict.post(reverse("account_login"), {}).content


@pytest.mark.parametrize("name", ["account_login", "account_signup", "account_reset_password"])
def test_signed_out_pages(client: Client, db: None, name: str) -> None:
    answer = client.get(reverse(name))
    assert b"The ceiling is never passed" in answer.content
    assert not HANDLER.search(answer.content.decode())


@pytest.mark.parametrize("name", ["account_change_password", "account_email", "account_logout"])
def test_pages_of_ones_own_account(owner_page: Client, name: str) -> None:
    answer = owner_page.get(reverse(name))
    assert answer.status_code == 200
    assert b'id="main"' in answer.content
