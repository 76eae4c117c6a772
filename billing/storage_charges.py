"""Charge storage by the day: the price book's price per GB and month, beyond the policy's free allowance.

Each day `jobs.storage_billing` measures the storage in use and calls `charge_day`; a day without a call is free. The
day's cost is added to the amount due. Whole minor units of the amount due are charged at once; fractions wait for the
next day. A charge takes at most the available amount of the wallet, credit first, so a wallet never falls below its
holds. The rest stays due until money is paid in.
"""

from __future__ import annotations

import calendar
from dataclasses import asdict
from datetime import date, timedelta
from decimal import ROUND_FLOOR, Decimal

from django.conf import settings
from django.db import transaction
from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from billing import credit, ledger, pricing
from billing.amounts import money
from billing.errors import NotPriced
from billing.models import Account, Hold, Quote, Receipt, StorageBalance, StorageDay
from billing.policy import policy
from billing.pricebooks import current_book
from billing.pricing import PriceKind
from console.accounts.emails import forget_sent

GB = 10**9
"""Bytes per gigabyte, the unit of the storage price."""
STOP_WRITES_AFTER = timedelta(days=7)
"""How long storage may be unpaid before all writes are refused: a week to notice the email and top up."""
DELETE_AFTER = timedelta(days=60)
"""How long storage may be unpaid before outputs are deleted: each day those of one job, the oldest job first, after an
email about that job. Two months are enough to notice the emails and pay, or to download the files."""
COST_PRECISION = Decimal("0.000001")
"""Daily costs are rounded to this fraction of a minor unit, the six decimals of their column."""
DAY_SECONDS = 86_400


def storage_price(currency: str) -> Decimal | None:
    """Return the current price per GB and month in minor units; None if storage is free."""
    try:
        book = current_book(currency=currency)
    except NotPriced:
        return None
    price = book.prices.filter(kind=PriceKind.STORAGE, product="").first()
    return price.amount if price and price.amount else None


def unpaid_minor(account: Account) -> int:
    """Return the amount due for storage, in whole minor units."""
    balance = StorageBalance.objects.filter(account=account).first()
    return balance.unpaid_minor if balance else 0


@transaction.atomic
def charge_day(*, account: Account, day: date, size_bytes: int) -> StorageDay | None:
    """Store and charge the cost of a day's storage. A repeated call returns the first row. None if storage is free.

    `size_bytes` includes the free allowance.
    """
    locked = _lock(account)
    if existing := StorageDay.objects.filter(account=locked, day=day).first():
        return existing
    price = storage_price(locked.currency)
    if price is None:
        return None
    free_bytes = policy().free_storage_gb * GB
    cost = daily_cost(size_bytes=size_bytes, free_bytes=free_bytes, price=price, day=day)
    storage_day = StorageDay.objects.create(
        account=locked, day=day, size_bytes=size_bytes, free_bytes=free_bytes, price=price, cost_minor=cost
    )
    balance, _created = StorageBalance.objects.get_or_create(account=locked)
    balance.due_minor += cost
    balance.save(update_fields=["due_minor"])
    collect(account=locked)
    return storage_day


@transaction.atomic
def collect(*, account: Account) -> int:
    """Charge the amount due for storage, at most the wallet's available amount. Returns the charge in minor units."""
    locked = _lock(account)
    # Locked, because the emails set `mailed_at` without the wallet's lock.
    balance = StorageBalance.objects.select_for_update().filter(account=locked).first()
    if balance is None:
        return 0
    credit.remove_expired(account=locked)
    locked.refresh_from_db()
    amount = max(0, min(int(balance.due_minor), locked.available_minor))
    if amount:
        balance.due_minor -= amount
        balance.payments += 1
        _charge(locked, number=balance.payments, amount_minor=amount)
    if balance.due_minor < 1:
        if balance.unpaid_since:
            forget_sent(balance)  # so that the next warning goes to all recipients again
        balance.unpaid_since = balance.mailed_at = None
    elif balance.unpaid_since is None:
        balance.unpaid_since = timezone.now()
    balance.save()
    return amount


def daily_cost(*, size_bytes: int, free_bytes: int, price: Decimal, day: date) -> Decimal:
    """Return the cost of a day's storage in minor units, rounded down to a millionth.

    The monthly price is divided by the days of that day's month, so that each month costs the same.
    """
    days = calendar.monthrange(day.year, day.month)[1]
    return (price * max(0, size_bytes - free_bytes) / GB / days).quantize(COST_PRECISION, ROUND_FLOOR)


def _lock(account: Account) -> Account:
    """Return the wallet, locked until the transaction ends. The lock also protects its StorageBalance."""
    return Account.objects.select_for_update(no_key=True).get(pk=account.pk)


def _charge(account: Account, *, number: int, amount_minor: int) -> Receipt:
    """Charge an amount to the locked wallet and write a receipt. `number` counts the charges of this wallet.

    Invoices, exports and cost pages read receipts with a hold and a quote, so a storage charge has these too. The
    quote's prices are 0, and its estimate and deadline are made up. None of these is used, because the amount is known.
    """
    terms = pricing.Terms(
        mode=pricing.Mode.METERED,
        nodes=1,
        epochs=1,
        hourly=Decimal(0),
        per_epoch=Decimal(0),
        minimum_minor=0,
        ceiling_minor=amount_minor,
    )
    # The line shows the size of the latest day, although the amount may also pay for earlier days.
    day = StorageDay.objects.filter(account=account).latest("day")
    line = pricing.Line(
        rule="storage",
        quantity=f"{Decimal(day.size_bytes) / GB:.3f}",
        unit="gigabytes",
        unit_minor=str(day.price),
        amount_minor=amount_minor,
    )
    now = timezone.now()
    quote = Quote.objects.create(
        organization=account.owner,
        book=current_book(currency=account.currency),
        currency=account.currency,
        mode=terms.mode,
        purchase={"storage": day.day.isoformat()},
        terms=terms.to_json(),
        lines=[line.to_json()],
        p50_minor=amount_minor,
        p90_minor=amount_minor,
        basis=asdict(pricing.Estimate(p50_seconds=DAY_SECONDS, p90_seconds=DAY_SECONDS, source="customer")),
        ceiling_minor=amount_minor,
        deadline_seconds=DAY_SECONDS,
        expires_at=now,
    )
    hold = Hold.objects.create(
        account=account,
        quote=quote,
        reference=f"{Hold.STORAGE_PREFIX}{account.pk}:{number}",
        amount_minor=amount_minor,
        metered_minor=amount_minor,
        charged_minor=amount_minor,
        labels={"product": "storage"},
        state=Hold.States.SETTLED,
        ended_at=now,
    )
    revenue = ledger.platform_account(Account.Kinds.REVENUE, account.currency)
    ledger.post(
        reference=f"settle:{hold.reference}",
        kind="storage",
        description=gettext_noop("Storage"),
        entries=[(account, -amount_minor), (revenue, amount_minor)],
    )
    credit.spend(hold=hold, amount_minor=amount_minor)
    return Receipt.objects.create(
        hold=hold,
        organization=quote.organization,
        title=f"Storage {day.day.isoformat()}",
        currency=account.currency,
        lines=[line.to_json()],
        total_minor=amount_minor,
        ceiling_minor=amount_minor,
    )


def unpaid_mail(balance: StorageBalance) -> tuple[str, str]:
    """Return the subject and text of the warning that storage is unpaid."""
    account, since = balance.account, balance.unpaid_since or timezone.now()
    context = {
        "organization": account.organization,
        "owed": money(int(balance.due_minor), account.currency),
        "stop": since + STOP_WRITES_AFTER,
        "delete": since + DELETE_AFTER,
        "url": f"{settings.TRAINYARD_URL}/wallet/",
    }
    subject = _("The wallet of %(organization)s can't pay for storage") % {"organization": account.organization}
    return subject, render_to_string("billing/mail/storage.txt", context)
