"""The sweeps."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from billing import charges, gateway, payments, tasks
from billing.errors import PaymentUnavailable
from billing.models import Quote, StripeEvent
from tests.factories.billing import TopUpFactory, book, quote, session_event, wallet

pytestmark = pytest.mark.django_db


def test_apply_event():
    stored = payments.receive(session_event(TopUpFactory()))
    tasks.apply_event(stored.pk)
    stored.refresh_from_db()
    assert stored.state == StripeEvent.States.APPLIED


def test_apply_events_makes_up_for_lost_messages():
    events = [payments.receive(session_event(TopUpFactory())) for _ in range(3)]
    tasks.apply_events()
    assert {event.state for event in StripeEvent.objects.all()} == {StripeEvent.States.APPLIED}
    assert all(StripeEvent.objects.get(pk=event.pk).applied_at for event in events)


def test_one_poisoned_event_keeps_the_sweep_from_no_other(monkeypatch, caplog):
    first, poisoned, last = [payments.receive(session_event(TopUpFactory())) for _ in range(3)]
    apply = payments.apply_event

    def choke(*, event_pk):
        if event_pk == poisoned.pk:
            raise RuntimeError("poison")
        apply(event_pk=event_pk)

    monkeypatch.setattr(payments, "apply_event", choke)
    tasks.apply_events()
    states = [StripeEvent.objects.get(pk=event.pk).state for event in (first, poisoned, last)]
    assert states == [StripeEvent.States.APPLIED, StripeEvent.States.RECEIVED, StripeEvent.States.APPLIED]
    assert f"Payment event {poisoned.pk}" in caplog.text


def test_quarantined_events_wait_for_a_person():
    event = payments.receive(session_event(TopUpFactory(), amount_total=1))
    tasks.apply_events()
    before = StripeEvent.objects.get(pk=event.pk)
    tasks.apply_events()
    assert before.state == StripeEvent.States.QUARANTINED
    assert StripeEvent.objects.get(pk=event.pk).applied_at == before.applied_at


def test_fetch_events_survives_a_provider_that_is_away(monkeypatch, caplog):
    def away(_created):
        raise PaymentUnavailable

    monkeypatch.setattr(gateway, "events_since", away)
    tasks.fetch_events()
    assert "did not answer" in caplog.text


def test_expire_quotes_forgets_what_nobody_bought():
    book()
    account = wallet(balance_minor=1000)
    fresh, stale, bought = (quote(account) for _ in range(3))
    charges.hold(quote=bought, reference="order:1")
    long_ago = timezone.now() - timedelta(days=1, seconds=1)
    Quote.objects.filter(pk__in=[stale.pk, bought.pk]).update(expires_at=long_ago)
    tasks.expire_quotes()
    assert set(Quote.objects.all()) == {fresh, bought}
