"""The double-entry ledger: the only module that writes balances.

Each transaction has a unique reference, so posting it twice changes nothing. Constraints and triggers in the database
enforce the rules: entries sum to zero, entries are append-only, `posted >= held >= 0`.

Every transaction locks rows in the same order, which prevents deadlocks: first the organization's row, then the row of
a hold, top-up or invoice series, then the wallet, then its settings of automatic top-ups. `post` locks the accounts of
organizations by id, then the platform's accounts by id. Many transactions share a platform account, so the platform's
accounts come last and are locked for the shortest time. Organizations and accounts are locked FOR NO KEY UPDATE, which
does not block inserts of rows that reference them. Other transactions make such inserts while they hold later locks, so
a blocked insert could be a deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from django.db import IntegrityError, connection, transaction
from django.db.models import F
from django.utils import timezone
from django.utils.translation import gettext as _
from psycopg import Cursor

from billing.amounts import money
from billing.errors import InsufficientFunds, LedgerConflict
from billing.models import Account, Entry

MOVE = "SELECT billing_move(%s, %s, %s, %s, %s::bigint[], %s::bigint[])"
"""Call of the stored function (migration 0012) that writes the balances, the transaction and its entries atomically.

Its parameters: reference, kind, description, time, account ids in locking order, and their amounts."""


def wallet_account(*, organization_id: int, currency: str) -> Account:
    """Return the organization's wallet. Create one in `currency` if there is none. Safe under concurrent calls.

    An organization has one wallet, so an existing wallet is returned even if it is in another currency.
    """
    Account.objects.bulk_create(
        [Account(organization_id=organization_id, kind=Account.Kinds.WALLET, currency=currency)], ignore_conflicts=True
    )
    return Account.objects.get(organization_id=organization_id, kind=Account.Kinds.WALLET)


def platform_account(kind: Account.Kinds, currency: str) -> Account:
    """Return the platform's account of this kind and currency. Create it if needed."""
    account = Account.objects.filter(organization=None, kind=kind, currency=currency).first()
    if account is None:
        Account.objects.bulk_create([Account(kind=kind, currency=currency)], ignore_conflicts=True)
        account = Account.objects.get(organization=None, kind=kind, currency=currency)
    return account


def receivable_account(wallet: Account) -> Account:
    """Return the account of the organization's debts. Create it if needed. A debt is a negative balance."""
    return _organization_account(wallet, Account.Kinds.RECEIVABLE)


def written_off_account(wallet: Account) -> Account:
    """Return the account of the organization's written-off debts. Create it if needed. A debt is a negative balance."""
    return _organization_account(wallet, Account.Kinds.WRITTEN_OFF)


def post(*, reference: str, kind: str, description: str, entries: Sequence[tuple[Account, int]]) -> bool:
    """Post a transaction of (account, amount in minor units) entries and return True.

    `reference` names what is posted, for example `top-up:<id>`. `kind` is the transaction's kind, such as "charge" or
    "top-up" (at most 16 characters). The amounts sum to zero, and each account occurs once. Entries of 0 are dropped.
    Returns False if the reference was already posted with the same entries.

    Raises InsufficientFunds if a wallet would fall below its holds, LedgerConflict if the reference exists with other
    entries, ValueError if the entries do not balance or are all zero.
    """
    amounts = {account.pk: amount for account, amount in entries if amount}
    if not amounts or sum(amounts.values()) != 0 or len({account.currency for account, _amount in entries}) > 1:
        raise ValueError(f"The entries of {reference} do not balance in one currency.")
    if len({account.pk for account, _amount in entries}) != len(entries):
        raise ValueError(f"The entries of {reference} name an account twice.")
    # The module's docstring gives this order: accounts of organizations first (False sorts before True), then by id.
    in_locking_order = sorted((account.organization_id is None, account.pk) for account, amount in entries if amount)
    accounts = [pk for _is_platform, pk in in_locking_order]
    values = (reference, kind, description, timezone.now(), accounts, [amounts[pk] for pk in accounts])
    # Inside a transaction, a savepoint keeps the caller's earlier changes if the database refuses the posting.
    savepoint = transaction.atomic() if connection.in_atomic_block else nullcontext()
    try:
        with savepoint:
            _move(values)
    except IntegrityError as error:
        # A repeated posting may violate another constraint before the unique reference is checked.
        if _is_posted(reference, amounts):
            return False
        if "wallet_covers_what_is_held" not in str(error):
            raise
        raise _insufficient_funds_for_posting(entries) from error
    return True


def hold(*, account: Account, amount_minor: int) -> None:
    """Increase the wallet's held amount. The caller records the hold in the same transaction.

    Raises InsufficientFunds.
    """
    is_held = Account.objects.filter(
        pk=account.pk, kind=Account.Kinds.WALLET, posted_minor__gte=F("held_minor") + amount_minor
    ).update(held_minor=F("held_minor") + amount_minor)
    if not is_held:
        account.refresh_from_db()
        raise _insufficient_funds(account, amount_minor)


def unhold(*, account: Account, amount_minor: int) -> None:
    """Decrease the wallet's held amount. The caller has locked the open hold, so its amount is released only once."""
    Account.objects.filter(pk=account.pk).update(held_minor=F("held_minor") - amount_minor)


def lock(*, account: Account) -> None:
    """Lock the wallet's row until the transaction ends.

    For callers that change neither balance nor holds, but must keep other transactions from changing these.
    """
    Account.objects.select_for_update(no_key=True).get(pk=account.pk)


def _insufficient_funds(account: Account, needed_minor: int) -> InsufficientFunds:
    """Return the error of a wallet that cannot cover `needed_minor`."""
    return InsufficientFunds(
        available_minor=account.available_minor,
        needed_minor=needed_minor,
        message=_("Your wallet has %(available)s available, but this needs %(needed)s. Top up by at least %(missing)s.")
        % {
            "available": money(account.available_minor, account.currency),
            "needed": money(needed_minor, account.currency),
            "missing": money(needed_minor - account.available_minor, account.currency),
        },
    )


def _organization_account(wallet: Account, kind: Account.Kinds) -> Account:
    """Return the account of this kind of the wallet's organization, in the wallet's currency. Create it if needed."""
    owner = {"organization_id": wallet.organization_id, "kind": kind, "currency": wallet.currency}
    Account.objects.bulk_create([Account(**owner)], ignore_conflicts=True)
    return Account.objects.get(**owner)


def _move(values: tuple[Any, ...]) -> None:
    """Call the stored function with psycopg's own cursor.

    Django's cursor writes the values into the statement. Psycopg's own binds them on the server, so PostgreSQL plans
    the statement only once.
    """
    connection.ensure_connection()
    with connection.wrap_database_errors, Cursor(connection.connection) as cursor:
        cursor.execute(MOVE, values)


def _insufficient_funds_for_posting(entries: Sequence[tuple[Account, int]]) -> InsufficientFunds:
    """Return the error for the wallet that the refused posting would have debited. Its balance is read again."""
    for account, amount in entries:
        if account.kind == Account.Kinds.WALLET and amount < 0:
            account.refresh_from_db()
            return _insufficient_funds(account, -amount)
    raise LedgerConflict("No wallet is debited, yet a wallet's constraint refused the posting.")


def _is_posted(reference: str, amounts: dict[int, int]) -> bool:
    """Return whether the reference exists with these entries. Raises LedgerConflict if it has others."""
    posted = dict(Entry.objects.filter(transaction__reference=reference).values_list("account_id", "amount_minor"))
    if posted and posted != amounts:
        raise LedgerConflict(f"{reference} was posted before with other entries.")
    return bool(posted)
