"""The admin of vouchers, invoices and price books: what it shows, what its acts do; on PostgreSQL."""

from __future__ import annotations

from decimal import Decimal

import pytest
from django.contrib.auth.models import Permission
from django.urls import reverse

from billing import charges, credit, invoices, pricebooks
from billing.models import BillingPolicy, Invoice, PriceBook, Voucher
from billing.pricing import Usage
from console.accounts.models import User
from tests.factories.accounts import UserFactory
from tests.factories.billing import book, quote, wallet

pytestmark = pytest.mark.django_db


@pytest.fixture
def admin(client):
    client.user = User.objects.create_superuser("admin@example.com", "x")
    client.force_login(client.user)
    return client


@pytest.fixture
def account():
    book()
    return wallet(balance_minor=10_000)


def charged(account, amount: int = 100, title: str = "#1 train.py"):
    made = quote(account, seconds=amount * 10)
    hold = charges.hold(quote=made, reference=str(made.pk), labels={"node_spec": "small", "product": "metered"})
    return charges.settle(hold=hold, usage=Usage(amount * 10, completed=True), title=title)


@pytest.fixture
def invoice(account) -> Invoice:
    charged(account, 100)
    charged(account, 50, "#2 other.py")
    return invoices.issue(organization=account.organization)


def text(answer) -> str:
    return answer.content.decode()


# Vouchers


def voucher_form(**changes):
    return {"code": "", "reason": "Welcome", "amount_minor": 500, "currency": "USD", "max_uses": 3,
            "max_uses_each": 1, "is_active": "on"} | changes  # fmt: skip


def test_a_voucher_without_a_code_gets_one(admin):
    assert admin.post(reverse("admin:billing_voucher_add"), voucher_form()).status_code == 302
    voucher = Voucher.objects.get()
    assert len(voucher.code) == 16
    assert voucher.created_by == admin.user


def test_a_currency_is_written_as_wallets_have_it(admin, account):
    admin.post(reverse("admin:billing_voucher_add"), voucher_form(currency="usd"))
    voucher = Voucher.objects.get()
    assert credit.redeem(account=account, code=voucher.code, user=admin.user).amount_minor == 500


def test_a_code_is_capitals_and_digits(admin):
    answer = admin.post(reverse("admin:billing_voucher_add"), voucher_form(code="no spaces!"))
    assert answer.status_code == 200
    assert not Voucher.objects.exists()


def test_what_was_promised_stays(admin):
    voucher = Voucher.objects.create(code="SUMMER", reason="x", amount_minor=500, currency="USD", max_uses=3, uses=1)
    page = reverse("admin:billing_voucher_change", args=[voucher.pk])
    none = {"grants-TOTAL_FORMS": 0, "grants-INITIAL_FORMS": 0}
    admin.post(page, voucher_form(code="WINTER", amount_minor=1, reason="Now so") | none)
    voucher.refresh_from_db()
    assert (voucher.code, voucher.amount_minor, voucher.reason) == ("SUMMER", 500, "Now so")
    assert admin.post(reverse("admin:billing_voucher_delete", args=[voucher.pk]), {"post": "yes"}).status_code == 403
    admin.post(reverse("admin:billing_voucher_changelist"), {"action": "end", "_selected_action": [voucher.pk]})
    voucher.refresh_from_db()
    assert not voucher.is_active


# Invoices


def test_an_invoice_is_there_to_be_read(admin, invoice):
    page = reverse("admin:billing_invoice_change", args=[invoice.pk])
    assert invoice.number in text(admin.get(page))
    assert admin.get(reverse("admin:billing_invoice_changelist")).status_code == 200
    assert admin.post(page, {"number": "x"}).status_code == 403
    assert admin.get(reverse("admin:billing_invoice_add")).status_code == 403


def correct(admin, invoice, **data):
    sent = {"after": invoice.notes.count()} | data
    return admin.post(reverse("admin:billing_invoice_correct", args=[invoice.pk]), sent, follow=True)


def test_a_credit_note(admin, account, invoice):
    first, second = invoice.lines.all()
    shown = text(admin.get(reverse("admin:billing_invoice_correct", args=[invoice.pk])))
    assert "$1.00" in shown
    assert "$0.50" in shown
    answer = correct(admin, invoice, **{f"line-{first.pk}": "0.4", f"line-{second.pk}": ""}, reason="A slip")
    note = Invoice.objects.get(kind="note")
    assert f"{note.number} is written." in text(answer)
    assert (note.total_minor, note.reason, note.issued_by) == (-40, "A slip", admin.user.email)
    account.refresh_from_db()
    assert account.posted_minor == 10_000 - 150 + 40


def test_a_credit_note_that_is_sent_twice_is_written_once(admin, invoice):
    shown = text(admin.get(reverse("admin:billing_invoice_correct", args=[invoice.pk])))
    assert '<input type="hidden" name="after" value="0">' in shown
    sent = {f"line-{invoice.lines.first().pk}": "0.4", "reason": "A slip", "after": 0}
    correct(admin, invoice, **sent)
    assert "Another credit note was written meanwhile" in text(correct(admin, invoice, **sent))
    assert Invoice.objects.filter(kind="note").count() == 1


@pytest.mark.parametrize(
    ("amount", "reason"),
    [("2", "A slip"), ("x", "A slip"), ("NaN", "A slip"), ("0.001", "A slip"), ("1", " "), ("", "x")],
)
def test_a_credit_note_that_is_refused(admin, invoice, amount, reason):
    answer = correct(admin, invoice, **{f"line-{invoice.lines.first().pk}": amount}, reason=reason)
    assert 'role="alert"' in text(answer)
    assert not Invoice.objects.filter(kind="note").exists()


def test_a_credit_note_takes_a_right_of_its_own(client, invoice):
    user = UserFactory(is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_invoice"))
    client.force_login(user)
    assert client.get(reverse("admin:billing_invoice_change", args=[invoice.pk])).status_code == 200
    line = invoice.lines.first()
    answer = client.post(
        reverse("admin:billing_invoice_correct", args=[invoice.pk]), {f"line-{line.pk}": "1", "reason": "Mine"}
    )
    assert answer.status_code == 403
    assert not Invoice.objects.filter(kind="note").exists()


def test_there_is_one_policy(admin):
    assert admin.get(reverse("admin:billing_billingpolicy_add")).status_code == 200
    BillingPolicy.objects.create(tax_percent=Decimal(19))
    assert admin.get(reverse("admin:billing_billingpolicy_add")).status_code == 403
    assert admin.get(reverse("admin:billing_billingpolicy_change", args=[1])).status_code == 200


# Price books


def test_a_preview(admin, account):
    charged(account, 100)
    draft = pricebooks.copy(book=PriceBook.objects.get())
    answer = admin.get(reverse("admin:billing_pricebook_preview", args=[draft.pk]))
    assert answer.status_code == 200
    assert "Under this book" in text(answer)


def test_changes_against_the_present_book(admin, account):
    draft = pricebooks.copy(book=PriceBook.objects.get())
    draft.prices.update(amount=Decimal("378"))
    shown = text(admin.get(reverse("admin:billing_pricebook_changes", args=[draft.pk])))
    assert "per node and hour, small, every product" in shown
    assert "+5.0%" in shown
    chosen = {"action": "compare", "_selected_action": list(PriceBook.objects.values_list("pk", flat=True))}
    assert "+5.0%" in text(admin.post(reverse("admin:billing_pricebook_changelist"), chosen))
    one = chosen | {"_selected_action": [draft.pk]}
    assert "Choose two books." in text(admin.post(reverse("admin:billing_pricebook_changelist"), one, follow=True))


def test_a_price_that_is_there_twice_is_named(admin, account):
    draft = pricebooks.copy(book=PriceBook.objects.get())
    price = draft.prices.get()
    row = {"kind": "node_hour", "product": "", "node_spec": price.node_spec_id, "nodes_from": 1, "amount": "1"}
    forms = {"prices-TOTAL_FORMS": 2, "prices-INITIAL_FORMS": 1, "prices-0-id": price.pk, "prices-0-book": draft.pk,
             "prices-1-book": draft.pk}  # fmt: skip
    forms |= {f"prices-{number}-{name}": value for number in (0, 1) for name, value in row.items()}
    answer = admin.post(
        reverse("admin:billing_pricebook_change", args=[draft.pk]), {"name": draft.name, "currency": "USD"} | forms
    )
    assert answer.status_code == 200
    assert "This price is there twice: per node and hour, small, every product." in text(answer)


def test_how_good_the_estimates_are(admin):
    assert "How good the estimates are" in text(admin.get(reverse("admin:jobs_job_calibration")))
