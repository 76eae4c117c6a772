"""What beat calls for credit, budgets and invoices: the tasks do what their services do."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.conf import settings
from django.core import mail
from django.utils import timezone

from billing import budgets, charges, credit, invoices, tasks
from billing.models import CreditGrant
from console.celery import app
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import book, quote, wallet

pytestmark = pytest.mark.django_db


def test_one_watch_takes_back_and_warns():
    book()
    member = MembershipFactory()
    account = wallet(member.organization, balance_minor=1000)
    lot = CreditGrant(
        organization=member.organization, amount_minor=50, reason="x", expires_at=timezone.now() + timedelta(days=1)
    )
    credit.grant(credit=lot, user=None, account=account)
    CreditGrant.objects.update(expires_at=timezone.now())
    budgets.set_budget(membership=member, user=None, amount_minor=100)
    charges.hold(quote=quote(account, member=member, seconds=600), reference="x")
    tasks.watch_money()
    tasks.watch_money()
    account.refresh_from_db()
    assert account.posted_minor == 1000
    assert len(mail.outbox) == 1


def test_invoices_of_the_months_that_are_over(monkeypatch):
    asked = []
    monkeypatch.setattr(invoices, "issue_due", lambda: asked.append(1))
    tasks.write_invoices()
    assert asked == [1]


@pytest.mark.parametrize("name", ["watch-money", "write-invoices"])
def test_beat_calls_them(name):
    app.loader.import_default_modules()
    assert settings.CELERY_BEAT_SCHEDULE[name]["task"] in app.tasks
