"""Costs, budgets, credit and invoices in the browser: what is sent, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from django.core.cache import cache
from django.test import Client
from django.urls import reverse

from billing import budgets, documents, invoices
from billing.models import BillingDetails, BillingPolicy, Budget, CreditGrant, Voucher
from console.accounts.models import Membership
from console.accounts.roles import Role
from jobs import dispatch
from jobs.models import Job
from runtime.specs import Outcome
from tests.factories.accounts import MembershipFactory
from tests.factories.jobs import Customer


def text(answer) -> str:
    return answer.content.decode()


def role(customer: Customer, name: Role) -> Membership:
    return MembershipFactory(organization=customer.organization, role=name)


# Costs and budgets


def test_a_months_costs(owner_page: Client, done: Job) -> None:
    shown = text(owner_page.get(reverse("cost_list"), {"by": "member"}))
    assert done.order.placed_by.email in shown
    assert "cost-data" in shown
    assert "Nothing was charged" in text(owner_page.get(reverse("cost_list"), {"month": "2020-01"}))


def test_costs_as_csv(owner_page: Client, done: Job) -> None:
    answer = owner_page.get(reverse("cost_export"))
    told = answer.getvalue().decode("utf-8-sig")
    assert answer["Content-Disposition"].startswith("attachment;")
    assert told.splitlines()[0].startswith("receipt,run,")
    assert f"R-{done.order.hold.receipt.pk},#{done.pk} train.py" in told


def test_a_budget_is_set_changed_and_taken_away(owner_page: Client, customer: Customer) -> None:
    set_to = lambda amount: owner_page.post(reverse("budget_set"), {"amount": amount, "member": ""}, follow=True)
    assert "The budget was set." in text(set_to("19,90"))
    assert Budget.objects.get().amount_minor == 1990
    for wrong in ("x", "NaN", "0", "-5", "1.999", "1e99"):
        set_to(wrong)
        assert Budget.objects.get().amount_minor == 1990
    assert "The budget was taken away." in text(set_to(""))
    assert not Budget.objects.exists()


def test_a_members_budget(owner_page: Client, customer: Customer, stranger: Membership) -> None:
    member = role(customer, Role.MEMBER)
    owner_page.post(reverse("budget_set"), {"amount": "5", "member": str(member.pk)})
    assert Budget.objects.get().user == member.user
    for wrong in (str(stranger.pk), "x", "0", "9" * 30, "9" * 5000):
        owner_page.post(reverse("budget_set"), {"amount": "7", "member": wrong})
    assert Budget.objects.get().amount_minor == 500


def test_a_member_sets_no_budget(customer: Customer, browser: Callable[[Membership], Client]) -> None:
    client = browser(role(customer, Role.MEMBER))
    assert client.post(reverse("budget_set"), {"amount": "5"}).status_code == 403
    assert "Set the budget" not in text(client.get(reverse("cost_list")))


def test_a_budget_that_is_reached_is_told_everywhere_and_stops_orders(owner_page: Client, customer: Customer) -> None:
    quote = customer.quote()
    budgets.set_budget(membership=customer.membership, user=None, amount_minor=quote.ceiling_minor)
    customer.order()
    for page in ("overview", "wallet", "cost_list"):
        assert 'data-budget-alert="100"' in text(owner_page.get(reverse(page)))
    answer = text(owner_page.post(reverse("training_order"), {"quote": str(quote.pk)}))
    assert "budget is" in answer
    assert 'role="alert"' in answer
    assert Job.objects.count() == 1


# Credit


@pytest.fixture
def voucher() -> Voucher:
    cache.clear()
    return Voucher.objects.create(code="WELCOME25", reason="Welcome", amount_minor=2500, currency="USD")


def test_a_voucher_is_entered(owner_page: Client, customer: Customer, voucher: Voucher) -> None:
    before = customer.wallet.posted_minor
    shown = text(owner_page.post(reverse("credit_list"), {"code": "welcome25"}, follow=True))
    assert "$25.00 of credit is in the wallet." in shown
    assert customer.wallet.posted_minor == before + 2500
    again = owner_page.post(reverse("credit_list"), {"code": "welcome25"})
    assert again.status_code == 422
    assert "as often as it may" in text(again)


def test_a_member_enters_none(customer: Customer, browser: Callable[[Membership], Client], voucher: Voucher) -> None:
    answer = browser(role(customer, Role.MEMBER)).post(reverse("credit_list"), {"code": "welcome25"})
    assert answer.status_code == 403
    assert not CreditGrant.objects.exists()


# Invoices


def test_invoicing_now(owner_page: Client, done: Job) -> None:
    shown = text(owner_page.post(reverse("invoice_new"), follow=True))
    made = invoices.invoices_for(done.organization).get()
    assert made.number in shown
    assert made.issued_by == done.order.placed_by.email
    assert "Nothing was charged since" in text(owner_page.post(reverse("invoice_new"), follow=True))


@pytest.mark.skipif(not documents.is_available(), reason="There is no Pango on this machine.")
def test_the_file(owner_page: Client, done: Job) -> None:
    made = invoices.issue(organization=done.organization)
    answer = owner_page.get(reverse("invoice_pdf", args=[made.pk]), {"language": "zh-hans"})
    assert answer["Content-Type"] == "application/pdf"
    assert answer["Content-Disposition"] == f'attachment; filename="{made.number}.pdf"'


def test_the_file_where_there_is_no_pango(owner_page: Client, done: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    made = invoices.issue(organization=done.organization)

    def missing(_name):
        raise OSError("cannot load library 'libpango-1.0-0'")

    documents._weasyprint.cache_clear()
    monkeypatch.setattr(documents, "importlib", SimpleNamespace(import_module=missing))
    shown = text(owner_page.get(reverse("invoice_pdf", args=[made.pk]), follow=True))
    assert "install Pango" in shown
    assert made.number in shown


def test_another_organizations_invoice(
    browser: Callable[[Membership], Client], stranger: Membership, done: Job
) -> None:
    made = invoices.issue(organization=done.organization)
    for page in ("invoice_detail", "invoice_pdf", "invoice_csv"):
        assert browser(stranger).get(reverse(page, args=[made.pk])).status_code == 404


def test_another_organizations_receipts_and_quotes(
    browser: Callable[[Membership], Client], stranger: Membership, customer: Customer, done: Job
) -> None:
    """Every address of money that names a row, and every form that names one, as somebody else's owner."""
    other, quote = browser(stranger), customer.quote()
    assert other.get(reverse("receipt_detail", args=[done.order.hold.receipt.pk])).status_code == 404
    assert other.get(reverse("training_paid", args=[quote.pk])).status_code == 404
    for page in ("training_order", "training_pay"):
        assert other.post(reverse(page), {"quote": str(quote.pk)}).status_code == 404
    before = [reverse(page) for page in ("wallet", "cost_list", "cost_export", "receipt_list", "invoice_list")]
    for answer in map(other.get, before):
        shown = b"".join(answer.streaming_content).decode() if answer.streaming else text(answer)
        assert done.name not in shown
    assert Job.objects.count() == 1


def test_details_are_for_the_next_invoice(owner_page: Client, done: Job) -> None:
    made = invoices.issue(organization=done.organization)
    form = {"name": "<b>Kunde</b>", "address": "Gleis 9", "tax_id": "DE1", "tax_percent": "0", "tax_note": "none"}
    owner_page.post(reverse("billing_details"), form)
    details = BillingDetails.objects.get()
    assert (details.name, details.tax_percent, details.tax_note) == ("<b>Kunde</b>", None, "")
    assert "&lt;b&gt;Kunde" in text(owner_page.get(reverse("invoice_list")))
    made.refresh_from_db()
    assert made.customer["name"] == done.organization.name


# The probe


def test_a_probe_from_the_quotes_card(owner_page: Client, customer: Customer) -> None:
    quote = customer.quote()
    answer = owner_page.post(reverse("training_probe"), {"quote": str(quote.pk)})
    job = Job.objects.get()
    assert answer["HX-Redirect"] == reverse("job_detail", args=[job.pk])
    assert job.order.quote.ceiling_minor == 0
    owner_page.post(reverse("training_probe"), {"quote": str(quote.pk)})
    assert Job.objects.count() == 1
    BillingPolicy.objects.create(probes_per_day=0)
    other = customer.quote()
    assert "used up" in text(owner_page.post(reverse("training_probe"), {"quote": str(other.pk)}))


def test_quoted_beside_actual(owner_page: Client, customer: Customer) -> None:
    job = customer.end(customer.started(), Outcome.COMPLETED)
    assert "data-outcome" in text(owner_page.get(reverse("job_detail", args=[job.pk])))


def test_a_platform_fault_stands_on_the_receipt_with_its_evidence(owner_page: Client, customer: Customer) -> None:
    customer.end(customer.started(), Outcome.NODE_LOST)
    job = Job.objects.get()
    while not job.is_ended:
        dispatch.start(job)
        attempt = job.attempts.last()
        customer.backend.start(attempt.run_name)
        dispatch.reconcile_job(job_pk=job.pk)
        customer.end(attempt, Outcome.NODE_LOST)
        job.refresh_from_db()
    shown = text(owner_page.get(reverse("receipt_detail", args=[job.order.hold.receipt.pk])))
    assert shown.count('data-evidence="node_lost"') == job.attempts.count() == 3
    assert "Attempt 1:" in shown
    assert job.order.hold.receipt.total_minor == 0
