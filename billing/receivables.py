"""What comes into a wallet from outside and what is taken out of it again, with what can't be taken owed.

Hides the accounts of what is owed and of what was written off. The one rule: money that a payment provider took back
never takes a wallet below what is held of it, nor credit that was given: what was paid in covers it, the rest is owed,
and the next money pays the debt, be it paid in or held no more: nobody owes what the wallet could pay. A debt that an
administrator wrote off is asked for no more; but money that had been taken back and returns after all (a dispute that
was won) makes good for it first.
"""

from __future__ import annotations

from django.db import transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from billing import credit, ledger
from billing.errors import WriteOffRefused
from billing.models import Account, Transaction, WriteOff
from billing.wording import money
from console.accounts import services
from console.accounts.errors import NotAllowed
from console.accounts.models import User
from console.operations.kept import Kept, given


@transaction.atomic
def pay_in(
    *, account: Account, amount_minor: int, reference: str, kind: str, description: str, returns: bool = False
) -> bool:
    """Money of the payment provider's into a wallet; a debt is paid from it at once. False: it was posted before.

    `returns`: it had been taken back, so that it also makes good for what was written off meanwhile.
    """
    clearing = ledger.platform_account(Account.Kinds.CLEARING, account.currency)
    entries = [(account, amount_minor), (clearing, -amount_minor)]
    if not ledger.post(reference=reference, kind=kind, description=description, entries=entries):
        return False
    locked = Account.objects.select_for_update(no_key=True).get(pk=account.pk)
    due = collect(account=locked, reference=reference)
    recovered = min(amount_minor - due, written_off_minor(locked), credit.paid_minor(locked)) if returns else 0
    if recovered:
        ledger.post(
            reference=f"recovered:{reference}",
            kind="write-off",
            description=gettext_noop("Paid from it: a debt that had been written off"),
            entries=[(locked, -recovered), (ledger.written_off_account(locked), recovered)],
        )
    return True


def collect(*, account: Account, reference: str) -> int:
    """Pay what is owed from what was paid in and is held no more. Gives how much.

    For whoever frees such money, in the same transaction, with the wallet locked: a run that ended below its ceiling,
    a credit note. `reference` is of what freed it.
    """
    owed = owed_minor(account)
    if not owed:
        return 0
    account.refresh_from_db()
    due = min(owed, credit.paid_minor(account))
    if due:
        ledger.post(
            reference=f"debt:{reference}",
            kind="debt",
            description=gettext_noop("Paid from it: what was owed"),
            entries=[(account, -due), (ledger.receivable_account(account), due)],
        )
        account.refresh_from_db()
    return due


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


@transaction.atomic
def write_off(*, account: Account, amount_minor: int, reason: str, user: User) -> WriteOff:
    """Give up a debt of a wallet's organization, in part or whole: an administrator's decision, with its reason.

    Raises NotAllowed, WriteOffRefused (at its field).
    """
    if not user.has_perm("billing.add_writeoff"):
        raise NotAllowed
    # Whoever owes more, or pays, does so with the wallet locked.
    wallet = Account.objects.select_for_update(no_key=True).get(
        organization=account.organization_id, kind=Account.Kinds.WALLET, currency=account.currency
    )
    owed = owed_minor(wallet)
    if not 1 <= amount_minor <= owed:
        sentence = _("At most %(owed)s is owed and can be written off.") % {"owed": money(owed, wallet.currency)}
        raise WriteOffRefused(sentence, fields={"amount_minor": sentence})
    if not reason.strip():
        sentence = _("Give the reason: it is kept with the write-off.")
        raise WriteOffRefused(sentence, fields={"reason": sentence})
    debt = ledger.receivable_account(wallet)
    made = WriteOff.objects.create(
        account=debt, amount_minor=amount_minor, reason=reason.strip()[:255], written_by=user
    )
    ledger.post(
        reference=f"write-off:{made.pk}",
        kind="write-off",
        description=made.reason,
        entries=[(debt, amount_minor), (ledger.written_off_account(wallet), -amount_minor)],
    )
    services.record(
        organization=wallet.organization,
        actor=user,
        action="debt.written_off",
        target=str(made),
        data={"amount_minor": amount_minor, "currency": wallet.currency, "reason": made.reason},
    )
    return made


def owed_minor(account: Account) -> int:
    """What the wallet's organization owes."""
    return _negative(account, Account.Kinds.RECEIVABLE)


def written_off_minor(account: Account) -> int:
    """What of the debts of the wallet's organization was given up, less what came back after all."""
    return _negative(account, Account.Kinds.WRITTEN_OFF)


_BESIDE = Kept(
    lambda: Account.objects.filter(organization=given("organization"), kind=given("kind"), currency=given("currency"))
)


def _negative(account: Account, kind: Account.Kinds) -> int:
    found = _BESIDE.all(organization=account.organization_id, kind=kind, currency=account.currency)
    return -sum(beside.posted_minor for beside in found)
