"""The sweeps."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from billing import automatic, charges, events, payment_mails, payments, reversals, tasks
from billing.models import Quote, StripeEvent, TopUp
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import TopUpFactory, book, quote, session_event, wallet
from tests.provider import lost, receive

pytestmark = pytest.mark.django_db


def test_apply_events_takes_all_that_waits(monkeypatch):
    waiting = iter([1000, 3, 0])
    monkeypatch.setattr(events, "apply_waiting", lambda: next(waiting))
    tasks.apply_events()
    assert list(waiting) == []


def test_apply_events_makes_up_for_lost_messages():
    rows = [receive(session_event(TopUpFactory())) for _ in range(3)]
    tasks.apply_events()
    assert {event.state for event in StripeEvent.objects.all()} == {StripeEvent.States.APPLIED}
    assert all(StripeEvent.objects.get(pk=row.pk).applied_at for row in rows)


def test_quarantined_events_wait_for_a_person():
    event = receive(session_event(TopUpFactory(), amount_total=1))
    tasks.apply_events()
    before = StripeEvent.objects.get(pk=event.pk)
    tasks.apply_events()
    assert before.state == StripeEvent.States.QUARANTINED
    assert StripeEvent.objects.get(pk=event.pk).applied_at == before.applied_at


def test_fetch_events_fetches_and_applies(provider):
    member = MembershipFactory()
    account = wallet(member.organization)
    top_up = payments.start_top_up(account=account, amount_minor=5000, user=member.user)
    provider.pay(top_up.session_id)
    tasks.fetch_events()
    top_up.refresh_from_db()
    assert top_up.state == TopUp.States.PAID


def test_fetch_events_survives_a_provider_that_is_away(provider, caplog):
    provider.wire.before = lost
    tasks.fetch_events()
    assert "did not answer" in caplog.text


def test_move_money_does_all_three(monkeypatch):
    done = []
    monkeypatch.setattr(automatic, "sweep", lambda: done.append("automatic"))
    monkeypatch.setattr(reversals, "tell_waiting", lambda: done.append("refunds"))
    monkeypatch.setattr(payment_mails, "send_due", lambda: done.append("mails"))
    tasks.move_money()
    assert done == ["automatic", "refunds", "mails"]


def test_expire_quotes_forgets_what_nobody_bought():
    book()
    account = wallet(balance_minor=1000)
    fresh, stale, bought = (quote(account) for _ in range(3))
    charges.hold(quote=bought, reference="order:1")
    long_ago = timezone.now() - timedelta(days=1, seconds=1)
    Quote.objects.filter(pk__in=[stale.pk, bought.pk]).update(expires_at=long_ago)
    tasks.expire_quotes()
    assert set(Quote.objects.all()) == {fresh, bought}
