"""Short words for runs that are charged and invoiced."""

from __future__ import annotations

from django.db import connection

from billing import charges, credit, invoices
from billing.models import (
    Account,
    CreditGrant,
    Invoice,
    Receipt,
)
from billing.pricing import Usage
from tests.factories.billing import quote


def run(account: Account, amount: int, title: str = "#1 train.py") -> Receipt:
    made = quote(account, seconds=max(amount, 1) * 10)
    hold = charges.hold(quote=made, reference=f"order:{made.pk}")
    return charges.settle(hold=hold, usage=Usage(amount * 10, completed=True), title=title)


def give(account: Account, amount: int) -> None:
    lot = CreditGrant(organization=account.organization, amount_minor=amount, reason="A test")
    credit.grant(credit=lot, user=None, account=account)


def issue(account: Account, **options) -> Invoice:
    invoice = invoices.issue(organization=account.organization, **options)
    assert invoice is not None
    check_now()
    return invoice


def check_now() -> None:
    """Deferred triggers wait for a commit that a test never makes."""
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("SET CONSTRAINTS ALL DEFERRED")


def figures(invoice: Invoice) -> tuple[int, int, int, int]:
    return invoice.subtotal_minor, invoice.credits_minor, invoice.tax_minor, invoice.total_minor


def balance(kind: Account.Kinds, owner: Account | None = None) -> int:
    organization = owner.organization if owner else None
    found = Account.objects.filter(organization=organization, kind=kind).first()
    return found.posted_minor if found else 0
