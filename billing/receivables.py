"""Payments into wallets, refunds and disputes that withdraw them, and the debts of organizations.

A withdrawal takes available paid-in money only, never held money or credit. The part that this money does not cover
becomes a debt, which the next payment or released hold pays. An administrator may write a debt off. If withdrawn money
returns later, for example after a won dispute, this money also repays the written-off debt.
"""

from __future__ import annotations

from django.db import transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from billing import credit, ledger
from billing.amounts import money
from billing.errors import WriteOffRefused
from billing.models import Account, Transaction, WriteOff
from console.accounts import services
from console.accounts.models import User
from console.core.errors import NotAllowed


@transaction.atomic
def pay_in(
    *, account: Account, amount_minor: int, reference: str, kind: str, description: str, is_return: bool = False
) -> bool:
    """Credit a payment to a wallet and pay debts from it. Returns False if it was already posted.

    `is_return` means that the money was withdrawn before. It then also repays a debt that was written off meanwhile.
    See `ledger.post` for `reference`, `kind` and `description`.
    """
    clearing = ledger.platform_account(Account.Kinds.CLEARING, account.currency)
    entries = [(account, amount_minor), (clearing, -amount_minor)]
    if not ledger.post(reference=reference, kind=kind, description=description, entries=entries):
        return False
    locked = Account.objects.select_for_update(no_key=True).get(pk=account.pk)
    collected = collect(account=locked, reference=reference)
    recovered = min(amount_minor - collected, written_off_minor(locked), credit.paid_minor(locked)) if is_return else 0
    if recovered:
        ledger.post(
            reference=f"recovered:{reference}",
            kind="write-off",
            description=gettext_noop("Payment of a written-off debt"),
            entries=[(locked, -recovered), (ledger.written_off_account(locked), recovered)],
        )
    return True


def collect(*, account: Account, reference: str) -> int:
    """Pay the organization's debt from available paid-in money and return the amount in minor units.

    Call it in the transaction that makes money available (a settled hold, a credit note), with the wallet locked.
    `reference` names that transaction.
    """
    owed = owed_minor(account)
    if not owed:
        return 0
    account.refresh_from_db()
    payable = min(owed, credit.paid_minor(account))
    if payable:
        ledger.post(
            reference=f"debt:{reference}",
            kind="debt",
            description=gettext_noop("Payment of a debt"),
            entries=[(account, -payable), (ledger.receivable_account(account), payable)],
        )
        account.refresh_from_db()
    return payable


@transaction.atomic
def withdraw(*, account: Account, amount_minor: int, reference: str, kind: str, description: str) -> bool:
    """Debit money that the provider returned to the payer. The part that the wallet cannot cover becomes a debt.

    Returns False if the reference was already posted. `ledger.post` cannot check this: a repeated call finds another
    balance and would split the amount differently, which `ledger.post` refuses as a conflict.
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


@transaction.atomic
def write_off(
    *, account: Account, amount_minor: int, reason: str, user: User, newest_seen: int | None = None
) -> WriteOff:
    """Write off all or a part of an organization's debt.

    `newest_seen` is the id of the newest write-off, of any debt, when the user's page was made. If this debt was
    written off since, the call is refused, so a form that is submitted twice writes off once. Raises NotAllowed,
    WriteOffRefused (with its field).
    """
    if not user.has_perm("billing.add_writeoff"):
        raise NotAllowed
    # Debts only change while the wallet is locked.
    wallet = Account.objects.select_for_update(no_key=True).get(
        organization=account.organization_id, kind=Account.Kinds.WALLET, currency=account.currency
    )
    debt = ledger.receivable_account(wallet)
    if newest_seen is not None and debt.write_offs.filter(pk__gt=newest_seen).exists():
        raise WriteOffRefused(_("This debt was written off in the meantime. Check the amount owed and try again."))
    owed = owed_minor(wallet)
    if not 1 <= amount_minor <= owed:
        sentence = _("The amount must be at most %(owed)s, the amount owed.") % {"owed": money(owed, wallet.currency)}
        raise WriteOffRefused(sentence, fields={"amount_minor": sentence})
    if not reason.strip():
        sentence = _("Enter a reason. It is kept with the write-off.")
        raise WriteOffRefused(sentence, fields={"reason": sentence})
    row = WriteOff.objects.create(account=debt, amount_minor=amount_minor, reason=reason.strip()[:255], written_by=user)
    ledger.post(
        reference=f"write-off:{row.pk}",
        kind="write-off",
        description=row.reason,
        entries=[(debt, amount_minor), (ledger.written_off_account(wallet), -amount_minor)],
    )
    services.record_audit_event(
        organization=wallet.organization,
        actor=user,
        action="debt.written_off",
        target=str(row),
        data={"amount_minor": amount_minor, "currency": wallet.currency, "reason": row.reason},
    )
    return row


def owed_minor(account: Account) -> int:
    """Return the debt of the wallet's organization in minor units, 0 if it owes nothing."""
    return _debt_minor(account, Account.Kinds.RECEIVABLE)


def written_off_minor(account: Account) -> int:
    """Return the written-off debt of the wallet's organization, less later repayments, in minor units."""
    return _debt_minor(account, Account.Kinds.WRITTEN_OFF)


def _debt_minor(account: Account, kind: Account.Kinds) -> int:
    """Return the debt on the organization's account of this kind. A debt is a negative balance.

    The sum gives 0 if the account does not exist: the first debt creates it.
    """
    accounts = Account.objects.filter(organization=account.organization_id, kind=kind, currency=account.currency)
    return -sum(accounts.values_list("posted_minor", flat=True))
