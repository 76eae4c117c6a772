"""The only writer of balances: double entry, append-only, keyed on what each movement is about.

Hides the SQL that writes a transaction, its entries and the balances in one call. The one rule: a reference is
posted once; posting it again changes nothing. The database refuses what would break the books (zero sum, `posted >=
held >= 0`).

Locks are taken in one order everywhere: a hold's record, then wallets by id, then the platform's accounts by id. So two
movements can wait for each other's end but never in a circle, and an account that everyone uses is locked last.
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

from billing.errors import InsufficientFunds, LedgerConflict
from billing.models import Account, Entry
from billing.wording import money
from console.operations.kept import Kept, given

MOVE = "SELECT billing_move(%s, %s, %s, %s, %s::bigint[], %s::bigint[])"
"""A function in the database (migration 0012): balances, transaction and entries in one call, refused as a whole."""


_PLATFORM = Kept(lambda: Account.objects.filter(organization=None, kind=given("kind"), currency=given("currency")))


def wallet_account(*, organization_id: int, currency: str) -> Account:
    """The organization's wallet, made when it has none. Safe to call twice at once."""
    Account.objects.bulk_create(
        [Account(organization_id=organization_id, kind=Account.Kinds.WALLET, currency=currency)], ignore_conflicts=True
    )
    return Account.objects.get(organization_id=organization_id, kind=Account.Kinds.WALLET)


def platform_account(kind: Account.Kinds, currency: str) -> Account:
    """The platform's own account of a kind, made when it is first needed."""
    account = _PLATFORM.first(kind=kind, currency=currency)
    if account is None:
        Account.objects.bulk_create([Account(kind=kind, currency=currency)], ignore_conflicts=True)
        account = Account.objects.get(organization=None, kind=kind, currency=currency)
    return account


def receivable_account(wallet: Account) -> Account:
    """What a wallet's organization owes, made when it first does. Its balance is 0 or below."""
    return _beside(wallet, Account.Kinds.RECEIVABLE)


def written_off_account(wallet: Account) -> Account:
    """What a wallet's organization owed and need not pay, made when it is first needed. Its balance is 0 or below."""
    return _beside(wallet, Account.Kinds.WRITTEN_OFF)


def post(*, reference: str, kind: str, description: str, entries: Sequence[tuple[Account, int]]) -> bool:
    """Move money. Each account occurs once; the amounts (minor units) sum to zero; zero amounts are not written.

    Returns whether it was posted now (False: it had been posted before, with the same entries). Raises
    InsufficientFunds where a wallet would go below what is held of it, LedgerConflict for a known reference with
    other entries, ValueError for entries that do not balance, or move nothing.
    """
    parts = {account.pk: amount for account, amount in entries if amount}
    if not parts or sum(parts.values()) != 0 or len({account.currency for account, _amount in entries}) > 1:
        raise ValueError(f"The entries of {reference} do not balance in one currency.")
    if len({account.pk for account, _amount in entries}) != len(entries):
        raise ValueError(f"The entries of {reference} name an account twice.")
    in_locking_order = sorted((account.organization_id is None, account.pk) for account, amount in entries if amount)
    accounts = [pk for _is_platform, pk in in_locking_order]
    values = (reference, kind, description, timezone.now(), accounts, [parts[pk] for pk in accounts])
    # Alone, the call is a transaction by itself; within one, a refusal must leave the caller's work standing.
    within = transaction.atomic() if connection.in_atomic_block else nullcontext()
    try:
        with within:
            _move(values)
    except IntegrityError as error:
        # A repeated posting may run into any rule before it meets its own reference.
        if _is_posted(reference, parts):
            return False
        if "wallet_covers_what_is_held" not in str(error):
            raise
        raise _short_of_funds(entries) from error
    return True


def hold(*, account: Account, amount_minor: int) -> None:
    """Set `amount_minor` of a wallet aside.

    Raises InsufficientFunds. The caller records what it is for, in the same transaction.
    """
    held = Account.objects.filter(
        pk=account.pk, kind=Account.Kinds.WALLET, posted_minor__gte=F("held_minor") + amount_minor
    ).update(held_minor=F("held_minor") + amount_minor)
    if not held:
        account.refresh_from_db()
        raise insufficient(account, amount_minor)


def unhold(*, account: Account, amount_minor: int) -> None:
    """Give back what `hold` set aside; the caller has locked the record of it, so that it happens once."""
    Account.objects.filter(pk=account.pk).update(held_minor=F("held_minor") - amount_minor)


def insufficient(account: Account, needed_minor: int) -> InsufficientFunds:
    """The error of a wallet that can't cover `needed_minor`, in words."""
    return InsufficientFunds(
        available_minor=account.available_minor,
        needed_minor=needed_minor,
        message=_("Your wallet has %(available)s available and this needs %(needed)s. Top up %(missing)s or more.")
        % {
            "available": money(account.available_minor, account.currency),
            "needed": money(needed_minor, account.currency),
            "missing": money(needed_minor - account.available_minor, account.currency),
        },
    )


def _beside(wallet: Account, kind: Account.Kinds) -> Account:
    owner = {"organization_id": wallet.organization_id, "kind": kind, "currency": wallet.currency}
    Account.objects.bulk_create([Account(**owner)], ignore_conflicts=True)
    return Account.objects.get(**owner)


def _move(values: tuple[Any, ...]) -> None:
    """The call itself, by psycopg's own cursor: its values travel beside the statement, which is planned once."""
    connection.ensure_connection()
    with connection.wrap_database_errors, Cursor(connection.connection) as cursor:
        cursor.execute(MOVE, values)


def _short_of_funds(entries: Sequence[tuple[Account, int]]) -> InsufficientFunds:
    """Which wallet was short, read after the refusal."""
    for account, amount in entries:
        if account.kind == Account.Kinds.WALLET and amount < 0:
            account.refresh_from_db()
            return insufficient(account, -amount)
    raise LedgerConflict("No wallet is debited, yet a wallet's constraint refused the posting.")


def _is_posted(reference: str, parts: dict[int, int]) -> bool:
    """Whether the reference is known, with these entries. Raises LedgerConflict where it has others."""
    known = dict(Entry.objects.filter(transaction__reference=reference).values_list("account_id", "amount_minor"))
    if known and known != parts:
        raise LedgerConflict(f"{reference} was posted before with other entries.")
    return bool(known)
