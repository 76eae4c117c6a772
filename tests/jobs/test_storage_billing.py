"""Storage that stays unpaid: first a mail, then no more writes, then the oldest files are deleted, until a payment."""

from datetime import timedelta

import pytest
from django.core import mail
from django.urls import reverse
from django.utils import timezone

from billing import pricebooks, receivables, storage_charges
from billing.models import BillingPolicy, Price, StorageBalance, StorageDay
from billing.pricebooks import current_book
from billing.pricing import PriceKind
from jobs import expiry, storage_billing
from jobs.errors import QuotaExceeded
from jobs.models import Job
from storage import selectors
from storage.models import Workspace

pytestmark = pytest.mark.django_db
DAY = timedelta(days=1)


@pytest.fixture
def priced(customer):
    """The customer stores 50 GB, and none of it is free."""
    BillingPolicy.objects.update_or_create(pk=1, defaults={"free_storage_gb": 0})
    draft = pricebooks.copy(book=current_book(currency="USD"))
    Price.objects.create(book=draft, kind=PriceKind.STORAGE, amount=600)
    pricebooks.publish(book=draft)
    fill(customer)
    return customer


def fill(customer):
    """Store that the workspace has 50 GB. Call this again after a run, whose end measures the workspace."""
    Workspace.objects.filter(pk=customer.workspace.pk).update(size_bytes=50 * storage_charges.GB)


def empty_wallet(customer):
    account = customer.wallet
    receivables.withdraw(
        account=account, amount_minor=account.posted_minor, reference="out", kind="test", description="x"
    )


def unpaid_for(days):
    """Let the storage have been unpaid for this long, and do what follows from it."""
    StorageBalance.objects.update(unpaid_since=timezone.now() - days * DAY)
    storage_billing.charge_all()


def test_a_day_is_charged_once_and_shown(priced, client):
    before = priced.wallet.posted_minor
    for _ in range(3):
        storage_billing.charge_all()
    (day,) = StorageDay.objects.all()
    charged = before - priced.wallet.posted_minor
    assert 0 <= day.cost_minor - charged < 1  # a fraction of a cent is charged later
    assert charged > 900  # 50 GB at 600 cents per GB and month are at least 967 cents a day
    client.force_login(priced.membership.user)
    assert "per GB and month" in client.get(reverse("storage_usage")).content.decode()
    assert "Storage" in client.get(reverse("wallet")).content.decode()
    assert "Storage on " in client.get(reverse("receipt_list")).content.decode()
    receipt = priced.organization.receipts.get()
    assert "Storage of the day" in client.get(reverse("receipt_detail", args=[receipt.pk])).content.decode()
    assert client.get(reverse("cost_list")).status_code == 200
    assert client.get(reverse("overview")).status_code == 200


def test_unpaid_storage_is_announced_then_stops_writes_then_costs_the_oldest_files(priced, client):
    jobs = [priced.ended_with_log() for _ in range(3)]
    fill(priced)
    quote = priced.quote()
    empty_wallet(priced)
    storage_billing.charge_all()
    storage_billing.charge_all()
    (message,) = mail.outbox
    assert message.to == [priced.membership.user.email]
    assert "can't pay for storage" in message.subject
    client.force_login(priced.membership.user)
    assert "for storage is unpaid" in client.get(reverse("wallet")).content.decode()
    usage = client.get("/api/v1/storage/").json()
    price = {"currency": "USD", "price_minor_per_gb_month": "600.000000", "free_bytes": 0, "stops_writes": False}
    assert {name: usage[name] for name in price} == price
    assert usage["unpaid_minor"] == int(StorageBalance.objects.get().due_minor) > 900
    assert usage["used_bytes"] >= 50 * storage_charges.GB
    unpaid_for(6)  # writes stop after 7 days
    assert selectors.quota_left(priced.organization) > 0
    unpaid_for(8)
    assert selectors.quota_left(priced.organization) == 0
    with pytest.raises(QuotaExceeded, match="can't pay for storage"):
        priced.place(quote)
    assert not Job.objects.exclude(keep_until=None).exists(), "no file is to be deleted yet"

    unpaid_for(61)  # deletions begin after 60 days, one job a day
    unpaid_for(61)
    assert list(Job.objects.exclude(keep_until=None)) == [jobs[0]]
    expiry.announce()
    assert f"#{jobs[0].pk}" in mail.outbox[-1].body

    receivables.pay_in(account=priced.wallet, amount_minor=10**6, reference="in", kind="test", description="x")
    storage_billing.charge_all()
    assert storage_charges.unpaid_minor(priced.wallet) == 0
    assert selectors.quota_left(priced.organization) > 0


def test_one_organization_that_fails_does_not_keep_the_others_from_being_charged(priced, other, monkeypatch):
    usage = selectors.usage

    def fails_for_the_first(organization):
        if organization == priced.organization:
            raise RuntimeError
        return usage(organization)

    monkeypatch.setattr(storage_billing.storage, "usage", fails_for_the_first)
    storage_billing.charge_all()
    assert [day.account.organization for day in StorageDay.objects.all()] == [other.organization]
