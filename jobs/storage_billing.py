"""Bill the storage of each organization once a day, and act when it stays unpaid.

Members get a mail as soon as storage is unpaid. After `STOP_WRITES_AFTER` nothing more can be written. After
`DELETE_AFTER` the files of one job a day are deleted, those of the oldest ended job first. Each deletion is announced
`expiry.NOTICE` before. A payment ends these measures, except for deletions that were already announced.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import partial

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from billing import storage_charges
from billing.emails import payers
from billing.models import Account, StorageBalance, StorageDay
from billing.storage_charges import storage_price
from console.accounts.emails import deliver, shared_connection
from console.accounts.models import Organization, Quota
from console.accounts.zones import installation_time
from jobs import expiry, results
from jobs.models import Job
from storage import selectors as storage
from storage.models import Allocation

logger = logging.getLogger(__name__)


def charge_all() -> None:
    """Charge today's storage to every wallet, and collect amounts that are still due. Called hourly; safe to repeat."""
    today = installation_time().date()
    charged_today = StorageDay.objects.filter(day=today).values("account")
    # The closure of an organization itself collects the amount that is due for storage.
    is_closed = Q(organization__closure__ends_at__lte=timezone.now())
    wallets = Account.objects.filter(kind=Account.Kinds.WALLET).exclude(is_closed)
    currencies = wallets.order_by().values_list("currency", flat=True).distinct()
    priced = [currency for currency in currencies if storage_price(currency) is not None]
    # A wallet whose organization may not write is looked at every hour, so that a payment soon allows writes again.
    due = Q(storage_balance__due_minor__gte=1) | Q(organization__quota__stops_writes=True)
    not_charged_today = Q(currency__in=priced) & ~Q(pk__in=charged_today)
    wallets = wallets.filter(due | not_charged_today)
    for account in wallets.select_related("organization").iterator():
        try:
            if account.currency in priced:
                size_bytes = storage.usage(account.owner).counted_bytes
                storage_charges.charge_day(account=account, day=today, size_bytes=size_bytes)
            storage_charges.collect(account=account)
            _enforce(account)
        except Exception:
            # An error with one organization must not keep the others from being charged.
            logger.exception("The storage of account %s could not be charged; the next hour tries again.", account.pk)
    unpaid = StorageBalance.objects.filter(mailed_at=None, unpaid_since__isnull=False)
    with shared_connection():
        for balance in unpaid.select_related("account__organization"):
            rows = StorageBalance.objects.filter(pk=balance.pk)
            # `deliver` sets `mailed_at`, so that each balance is mailed once.
            deliver(rows, partial(storage_charges.unpaid_mail, balance), payers(balance.account.owner))


def _enforce(account: Account) -> None:
    """Stop or allow writes, and shorten the retention of old files, depending on how long storage has been unpaid."""
    balance = StorageBalance.objects.filter(account=account).first()
    since = balance.unpaid_since if balance else None
    unpaid_for = timezone.now() - since if since else timedelta(0)
    stops_writes = unpaid_for >= storage_charges.STOP_WRITES_AFTER
    changed_quota = Quota.objects.filter(organization=account.owner).exclude(stops_writes=stops_writes)
    changed_quota.update(stops_writes=stops_writes)
    if unpaid_for >= storage_charges.DELETE_AFTER:
        _expire_oldest(account.owner)


def _expire_oldest(organization: Organization) -> None:
    """Have the files of the oldest ended job deleted after `expiry.NOTICE`. Do so for one job a day at most.

    `expiry.announce` sends the email about the deletion.
    """
    deletion_at = timezone.now() + expiry.NOTICE
    runs = Allocation.objects.filter(organization=organization, kind=Allocation.Kinds.RUN)
    if runs.filter(kept_until__gt=deletion_at - timedelta(days=1), kept_until__lte=deletion_at).exists():
        return  # the files of a job were already announced within the last day
    pks = [allocation.job_pk for allocation in runs.filter(kept_until__gt=deletion_at)]
    oldest = Job.objects.filter(pk__in=pks, finished_at__isnull=False).order_by("finished_at", "pk").first()
    if oldest is None:
        return
    with transaction.atomic():
        # Without a `deletion_notice`, the job is announced again, with the new time.
        Job.objects.filter(pk=oldest.pk).update(keep_until=deletion_at, deletion_notice=None)
        runs.filter(key=results.allocation_key(oldest.pk)).update(kept_until=deletion_at)
