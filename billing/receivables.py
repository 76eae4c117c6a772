"""What comes into a wallet from outside and what is taken out of it again, with what can't be taken owed.

Hides the receivable account. The one rule: money that a payment provider took back never takes a wallet below what is
held of it, nor credit that was given: what was paid in covers it, the rest is owed, and the next money pays the debt.
"""

from __future__ import annotations

from django.db import transaction
from django.db.models import Sum
from django.utils.translation import gettext_noop

from billing import credit, ledger
from billing.models import Account, Transaction


@transaction.atomic
def pay_in(*, account: Account, amount_minor: int, reference: str, kind: str, description: str) -> bool:
    """Money of the payment provider's into a wallet; a debt is paid from it at once. False: it was posted before."""
    clearing = ledger.platform_account(Account.Kinds.CLEARING, account.currency)
    entries = [(account, amount_minor), (clearing, -amount_minor)]
    if not ledger.post(reference=reference, kind=kind, description=description, entries=entries):
        return False
    locked = Account.objects.select_for_update(no_key=True).get(pk=account.pk)
    due = min(owed_minor(locked), credit.paid_minor(locked))
    if due:
        ledger.post(
            reference=f"debt:{reference}",
            kind="debt",
            description=gettext_noop("Paid from it: what was owed"),
            entries=[(locked, -due), (ledger.receivable_account(locked), due)],
        )
    return True


@transaction.atomic
def take_back(*, account: Account, amount_minor: int, reference: str, kind: str, description: str) -> bool:
    """Money out of a wallet to the payment provider; what the wallet can't cover is owed. False: it was posted before.

    How it is split depends on the wallet at this moment, so the reference is looked for while the wallet is locked.
    """
    locked = Account.objects.select_for_update(no_key=True).get(pk=account.pk)
    if Transaction.objects.filter(reference=reference).exists():
        return False
    covered = min(amount_minor, credit.paid_minor(locked))
    entries = [(ledger.platform_account(Account.Kinds.CLEARING, account.currency), amount_minor)]
    if covered:
        entries.append((locked, -covered))
    if covered < amount_minor:
        entries.append((ledger.receivable_account(locked), covered - amount_minor))
    return ledger.post(reference=reference, kind=kind, description=description, entries=entries)


def owed_minor(account: Account) -> int:
    """What the wallet's organization owes."""
    owed = Account.objects.filter(
        organization=account.organization_id, kind=Account.Kinds.RECEIVABLE, currency=account.currency
    ).aggregate(total=Sum("posted_minor"))
    return -int(owed["total"] or 0)
