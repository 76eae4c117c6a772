"""Runs that are bought, charged and invoiced. Ten seconds of a node cost one minor unit."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import connection
from django.utils import timezone

from billing import charges, credit, invoices
from billing.models import Account, CreditGrant, Hold, Invoice, Receipt
from billing.pricing import Usage
from console.accounts.models import Membership
from tests.factories.billing import quote


def buy(account: Account, amount: int, *, member: Membership | None = None, **labels: str) -> Hold:
    """Hold `amount` for a run that `member` orders. `labels`, such as its `node_spec`, are stored with the hold."""
    offer = quote(account, member=member, seconds=max(amount, 1) * 10)  # a run that will cost nothing holds 1
    user = member.user if member else None
    return charges.hold(quote=offer, reference=f"order:{offer.pk}", user=user, labels=labels)


def settle(hold: Hold, amount: int, title: str = "#1 train.py") -> Receipt:
    """End a run that used `amount`."""
    return charges.settle(hold=hold, usage=Usage(amount * 10, completed=True), title=title)


def run(account: Account, amount: int, title: str = "#1 train.py", **options) -> Receipt:
    """Buy a run of `amount` and use all of it."""
    return settle(buy(account, amount, **options), amount, title)


def give_credit(account: Account, amount: int, *, days: float | None = None) -> CreditGrant:
    """Grant promotional credit, which expires after `days`."""
    expires_at = timezone.now() + timedelta(days=days) if days is not None else None
    lot = CreditGrant(organization=account.organization, amount_minor=amount, reason="A test", expires_at=expires_at)
    credit.grant(credit_grant=lot, user=None, account=account)
    account.refresh_from_db()
    return lot


def issue(account: Account) -> Invoice:
    """Invoice all that is not invoiced yet."""
    invoice = invoices.issue(organization=account.organization)
    assert invoice is not None
    check_constraints()
    return invoice


def check_constraints() -> None:
    """Run the deferred triggers, which otherwise wait for a commit that a test never makes."""
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("SET CONSTRAINTS ALL DEFERRED")


def backdate(receipt: Receipt, at: datetime) -> Receipt:
    """Change when a receipt was written. Triggers refuse that, so they are off meanwhile."""
    check_constraints()
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL session_replication_role = replica")
        Receipt.objects.filter(pk=receipt.pk).update(created_at=at)
        cursor.execute("SET LOCAL session_replication_role = origin")
    return receipt


def figures(invoice: Invoice) -> tuple[int, int, int, int]:
    """Return subtotal, credits, tax and total."""
    return invoice.subtotal_minor, invoice.credits_minor, invoice.tax_minor, invoice.total_minor


def posted_and_held(account: Account) -> tuple[int, int]:
    """Return the account's balance, and how much of it is held."""
    account.refresh_from_db()
    return account.posted_minor, account.held_minor


def posted(kind: Account.Kinds, wallet: Account | None = None) -> int:
    """Return the balance of the platform's account of this kind, or of the account of the wallet's organization."""
    row = Account.objects.filter(organization=wallet.organization if wallet else None, kind=kind).first()
    return row.posted_minor if row else 0
