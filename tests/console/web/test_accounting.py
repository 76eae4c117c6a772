"""Pages of costs, budgets, credit, invoices and quotes: what they show, and what their forms change."""

import time
from types import SimpleNamespace

import pytest
from django.test import Client
from django.urls import reverse

from billing import budgets, invoice_pdf, invoices
from billing.models import BillingDetails, BillingPolicy, Budget, CreditGrant, Quote, Voucher
from console.accounts.roles import Role
from console.web import wallet
from jobs import orders
from jobs.models import Job
from runtime.specs import Outcome
from storage.selectors import storage_used
from tests.caching import clear_cache
from tests.factories.accounts import PASSWORD, MembershipFactory


def test_a_month_of_costs_is_shown_and_exported_as_csv(owner_page, completed_job):
    shown = owner_page.get(reverse("cost_list"), {"by": "member"}).text
    assert completed_job.order.placed_by.email in shown
    assert f'cell">{completed_job.node_spec.title}<' in shown
    assert "cost-data" in shown
    assert "No charges in this month" in owner_page.get(reverse("cost_list"), {"month": "2020-01"}).text
    assert "data-returned" not in shown
    invoice = invoices.issue(organization=completed_job.organization)
    line = invoice.lines.get()
    note = invoices.correct(invoice=invoice, amounts={line.pk: 2}, reason="A slip", user=None)
    assert "Credit notes returned $0.02, not deducted here" in owner_page.get(reverse("cost_list")).text
    assert f"{note.number}: A slip" in owner_page.get(reverse("wallet")).text
    receipt = owner_page.get(reverse("receipt_detail", args=[line.receipt_id])).text
    assert f"Credit note {note.number} returned $0.02: A slip" in receipt
    rows = owner_page.get(reverse("cost_export")).getvalue().decode("utf-8-sig")
    assert rows.splitlines()[0].startswith("receipt,run,")
    assert f"R-{completed_job.order.hold.receipt.pk},#{completed_job.pk} train.py" in rows


def test_a_budget_is_set_changed_and_removed(owner_page, customer, stranger):
    set_to = lambda amount: owner_page.post(reverse("budget_set"), {"amount": amount, "member": ""}, follow=True)
    assert "The budget was saved." in set_to("19,90").text
    for invalid in ("x", "NaN", "0", "-5", "1.999", "1e99"):
        set_to(invalid)
        assert Budget.objects.get().amount_minor == 1990
    assert "The budget was removed." in set_to("").text
    assert not Budget.objects.exists()
    member = MembershipFactory(organization=customer.organization, role=Role.MEMBER)
    owner_page.post(reverse("budget_set"), {"amount": "5", "member": str(member.pk)})
    assert Budget.objects.get().user == member.user
    for invalid in (str(stranger.pk), "x", "0", "9" * 30, "9" * 5000):
        owner_page.post(reverse("budget_set"), {"amount": "7", "member": invalid})
    assert Budget.objects.get().amount_minor == 500


def use_up_budget(customer):
    budgets.set_budget(membership=customer.membership, user=None, amount_minor=customer.quote().ceiling_minor)
    customer.order()


def use_up_storage(customer):
    customer.quota(max_storage_bytes=storage_used(customer.organization))


@pytest.mark.parametrize(
    ("use_up", "sentence"), [(use_up_budget, "budget is"), (use_up_storage, "storage quota is used up")]
)
def test_a_quote_says_which_limit_is_reached_and_pages_of_money_show_the_budgets(
    owner_page, customer, use_up, sentence
):
    quote = customer.quote()
    use_up(customer)
    before = Job.objects.count()
    # `touched` names the fields that the customer has edited. Errors of other fields are not shown beside them.
    shown = owner_page.post(reverse("training_quote"), customer.form(touched="")).text
    assert sentence in shown
    assert f"View {'budgets' if use_up is use_up_budget else 'storage'}" in shown
    assert 'id="buy"' not in shown
    assert 'id="buy-bar"' not in shown, "the bar of phones"
    api = owner_page.post(reverse("api_quotes"), customer.form(), content_type="application/json").json()
    assert sentence in api["refusal"]
    refused = owner_page.post(reverse("training_order"), {"quote": str(quote.pk)}).text
    assert sentence in refused
    assert reverse("training_comparison", args=[quote.pk]) in refused, "the quote can be bought later"
    assert Job.objects.count() == before
    for page in ("wallet", "cost_list"):  # the number is the share of the budget that is used, in per cent
        is_alert_shown = 'data-budget-alert="100"' in owner_page.get(reverse(page)).text
        assert is_alert_shown == (use_up is use_up_budget), page


def test_a_price_names_its_minimum_the_discount_of_many_nodes_and_what_a_fixed_price_includes(owner_page, customer):
    page = owner_page.get(reverse("training_new")).text
    assert "From 4 nodes: $0.81 / h each" in page  # `nano`: 10 % less than $0.90
    specs = owner_page.get(reverse("api_node_specs")).json()["results"]
    assert page.count('data-discount="4"') == len(specs)
    assert specs[0]["discounts"] == [{"nodes_from": 4, "hourly_minor": "81.0000"}]
    form = customer.form(touched="", product="fixed", epochs=1, nodes=1, max_time="10")  # minutes
    # An epoch's price includes 60 s: the product's reference of 20 s, times 1.5 for p90, times its headroom of 2.
    answer = owner_page.post(reverse("training_quote"), form).text
    quote = Quote.objects.latest("created_at")
    for part in (
        f'data-ceiling="{quote.ceiling_minor}"', "Ceiling: you never pay more", 'data-included="60"',
        "Then per node-hour", 'data-minimum="5"',
    ):  # fmt: skip
        assert part in answer
    for included in ({"max_time": "1"}, {"max_time": "", "epochs": 20}):  # no time beyond what the price includes
        exact = owner_page.post(reverse("training_quote"), form | included).text
        assert (">Price<" in exact, "Then per node-hour" in exact) == (True, False)
    api = owner_page.get(reverse("api_quote", args=[quote.pk])).json()
    assert (api["minimum_minor"], api["included_seconds"]) == (5, 60)


def test_a_cancelled_run_pays_the_minimum_and_says_so(owner_page, customer):
    started_at = time.time()
    attempt = customer.started(at=started_at)
    orders.cancel_job(membership=customer.membership, job=attempt.job)
    job = customer.end(attempt, Outcome.STOPPED, at=started_at + 1)
    page = owner_page.get(reverse("job_detail", args=[job.pk])).text
    assert "The run was cancelled. You pay for the time it used, at least the minimum charge." in page
    receipt = job.order.hold.receipt
    assert receipt.total_minor == 5  # the minimum charge
    page = owner_page.get(reverse("receipt_detail", args=[receipt.pk])).text
    assert "raises the total to the minimum" in page


def test_a_voucher_is_redeemed(owner_page, customer):
    clear_cache()  # it counts wrong codes, also those of earlier tests
    Voucher.objects.create(code="WELCOME25", reason="Welcome", amount_minor=2500, currency="USD")
    before = customer.wallet.posted_minor
    shown = owner_page.post(reverse("credit_list"), {"code": "welcome25"}, follow=True).text
    assert "$25.00 of credit was added to your wallet." in shown
    assert customer.wallet.posted_minor == before + 2500
    repeated = owner_page.post(reverse("credit_list"), {"code": "welcome25"})
    assert repeated.status_code == 422
    assert "the maximum number of times" in repeated.text


@pytest.mark.usefixtures("no_redis")
def test_without_redis_no_code_or_password_is_tried(owner_page, api, customer):
    """Nothing counts the wrong ones, so even the right ones are refused, with the reason."""
    Voucher.objects.create(code="WELCOME25", reason="Welcome", amount_minor=2500, currency="USD")
    client, browser = api(customer.membership), Client(raise_request_exception=False)
    owner_page.raise_request_exception = client.raise_request_exception = False
    answers = [
        owner_page.post(reverse("credit_list"), {"code": "WELCOME25"}),
        client.post("/api/v1/vouchers/redeem/", {"code": "WELCOME25"}),
        browser.post(reverse("account_login"), {"login": customer.membership.user.email, "password": PASSWORD}),
    ]
    for answer in answers:
        assert (answer.status_code, "Redis cannot be reached" in answer.text) == (503, True)
        assert int(answer["Retry-After"]) > 0
    assert answers[1].json()["code"] == "redis_unavailable"
    assert not CreditGrant.objects.exists()
    assert "_auth_user_id" not in browser.session


def test_an_invoice_is_issued_on_request_and_keeps_the_billing_details_of_its_time(owner_page, completed_job):
    shown = owner_page.post(reverse("invoice_new"), follow=True).text
    invoice = invoices.invoices_for(completed_job.organization).get()
    assert invoice.number in shown
    assert invoice.issued_by == completed_job.order.placed_by.email
    assert "There are no charges since" in owner_page.post(reverse("invoice_new"), follow=True).text
    form = {"name": "<b>Kunde</b>", "address": "Gleis 9", "tax_id": "DE1", "tax_percent": "0", "tax_note": "none"}
    owner_page.post(reverse("billing_details"), form)
    details = BillingDetails.objects.get()
    # Only an administrator sets the tax.
    assert (details.name, details.tax_percent, details.tax_note) == ("<b>Kunde</b>", None, "")
    assert "&lt;b&gt;Kunde" in owner_page.get(reverse("invoice_list")).text
    invoice.refresh_from_db()
    assert invoice.customer["name"] == completed_job.organization.name


@pytest.mark.skipif("not invoice_pdf.is_available()", reason="Pango, which renders PDFs, is not installed.")
def test_an_invoice_is_sent_as_pdf_to_its_own_organization_alone(owner_page, completed_job, browser, stranger):
    address = reverse("invoice_pdf", args=[invoices.issue(organization=completed_job.organization).pk])
    answer = owner_page.get(address, {"language": "zh-hans"})
    assert answer["Content-Type"] == "application/pdf"
    assert answer["Content-Disposition"].startswith('attachment; filename="')
    assert browser(stranger).get(address).status_code == 404


def test_without_pango_the_page_says_what_to_install(owner_page, completed_job, monkeypatch):
    def missing(_name):
        raise OSError("cannot load library 'libpango-1.0-0'")

    invoice_pdf._weasyprint.cache_clear()  # it keeps the module that an earlier call imported
    monkeypatch.setattr(invoice_pdf, "importlib", SimpleNamespace(import_module=missing))
    invoice = invoices.issue(organization=completed_job.organization)
    assert "need Pango" in owner_page.get(reverse("invoice_pdf", args=[invoice.pk]), follow=True).text


def test_receipts_are_found_by_name_and_number_the_newest_first(owner_page, completed_job, customer, monkeypatch):
    receipt = completed_job.order.hold.receipt.pk
    found = lambda query: f"R-{receipt}<" in owner_page.get(reverse("receipt_list"), {"q": query}).text
    name, job = completed_job.name, completed_job.pk
    for query in ("", name[1:-1].upper(), f"R-{receipt}", f"r-{receipt}", str(receipt), f"#{job}"):
        assert found(query), query
    for query in (f"{name}x", f"R-{receipt + 1}", f"#{job + 1}", f"#{job}0", "9" * 40, "R-"):
        assert not found(query), query
    newest = customer.end(customer.started(name=completed_job.name), Outcome.COMPLETED).order.hold.receipt
    monkeypatch.setattr(wallet, "MAX_MATCHES", 1)
    page = owner_page.get(reverse("receipt_list"), {"q": completed_job.name}).text
    assert f"R-{newest.pk}<" in page
    assert f"R-{receipt}<" not in page
    assert "Only the newest 1 matches are shown." in page


def test_another_organization_neither_sees_nor_buys_a_quote(browser, stranger, customer):
    client, quote = browser(stranger), customer.quote()
    assert client.get(reverse("training_paid", args=[quote.pk])).status_code == 404
    for page in ("training_order", "training_pay"):
        assert client.post(reverse(page), {"quote": str(quote.pk)}).status_code == 404
    assert not Job.objects.exists()


def test_an_estimate_is_free_and_runs_once_per_quote(owner_page, customer):
    quote = customer.quote()
    for _ in range(2):
        answer = owner_page.post(reverse("training_free_estimate"), {"quote": str(quote.pk)})
        job = Job.objects.get()
        assert answer["HX-Redirect"] == reverse("job_detail", args=[job.pk])
    assert job.order.quote.ceiling_minor == 0
    customer.run(job)
    shown = owner_page.get(reverse("job_detail", args=[job.pk]), {"tab": "events"}).text
    assert ("This run is free." in shown, "You pay" in shown, "harging" in shown) == (True, False, False)
    customer.end(job.attempts.get(), Outcome.TIME_LIMIT)
    job.attempts.update(cursor={"reads_left": 1})
    assert "still being read" in owner_page.get(reverse("job_detail", args=[job.pk])).text
    job.attempts.update(cursor={})
    for epoch, sentence in ((0, "nothing was measured"), (1, "This free estimate measured your script.")):
        Job.objects.update(epoch=epoch)
        assert sentence in owner_page.get(reverse("job_detail", args=[job.pk])).text
    form = owner_page.get(reverse("training_new"), {"rerun": job.pk}).text
    assert 'name="max_time" inputmode="decimal" value="60"' in form, "as in the quote"
    BillingPolicy.objects.create(probes_per_day=0)
    assert "used up" in owner_page.post(reverse("training_free_estimate"), {"quote": str(customer.quote().pk)}).text


def test_a_platform_fault_is_on_the_receipt_with_its_evidence(owner_page, customer):
    customer.end(customer.started(), Outcome.NODE_LOST)
    job = Job.objects.get()
    while not job.is_ended:
        customer.end(customer.run(job), Outcome.NODE_LOST)
        job.refresh_from_db()
    shown = owner_page.get(reverse("receipt_detail", args=[job.order.hold.receipt.pk])).text
    # The first attempt and two free retries, which are all that a job gets.
    assert shown.count('data-evidence="node_lost"') == job.attempts.count() == 3
    assert "Attempt 1:" in shown
    assert job.order.hold.receipt.total_minor == 0
