"""Automatic top-ups: begun when due, charged once whatever is repeated, and switched off when they keep failing."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core import mail
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from billing import auto_topup, customers, gateway, payment_emails, receivables, refunds
from billing.models import AutoTopUp, TopUp
from console.accounts.models import ServiceActivation
from tests.billing.paying import balance, forget_idempotency_keys, switch_on_auto_top_ups
from tests.factories.accounts import UserFactory
from tests.provider import FAILS_LATER
from tests.racing import raised, together

pytestmark = pytest.mark.django_db


def automatic_top_ups():
    """Return the automatic top-ups of $20 each. With one, the wallet of `top_up` has 7000 minor units."""
    return TopUp.objects.filter(origin=TopUp.Origins.AUTOMATIC)


def give_up_service(top_up):
    now = timezone.now()
    return ServiceActivation.objects.create(
        organization=top_up.account.organization, terms_version="1", activated_at=now, deactivated_at=now
    )


def test_a_deactivated_service_is_not_charged(provider, top_up):
    switch_on_auto_top_ups(top_up)
    activation = give_up_service(top_up)
    assert auto_topup.run_due() == 0
    assert auto_topup.create_if_due(setup_pk=AutoTopUp.objects.get().pk) is None
    assert not automatic_top_ups().exists()
    activation.deactivated_at = None
    activation.save()
    assert auto_topup.run_due() == 1
    provider.deliver()
    assert balance(top_up) == 7000


class TestPeriodicTask:
    def test_charges_only_while_it_is_on_and_the_balance_is_below_the_threshold(self, provider, top_up):
        switch_on_auto_top_ups(top_up, threshold=5000)  # the balance of 5000 is not below the threshold
        assert auto_topup.run_due() == 0
        switch_on_auto_top_ups(top_up, threshold=6000)
        auto_topup.switch_off(account=top_up.account)
        assert auto_topup.run_due() == 0
        switch_on_auto_top_ups(top_up, threshold=6000)
        for _ in range(3):
            auto_topup.run_due()
            provider.deliver()
        assert balance(top_up) == provider.held() == 7000
        assert automatic_top_ups().get().state == TopUp.States.PAID

    def test_waits_for_each_payment_and_stops_at_the_daily_limit(self, provider, top_up, monkeypatch):
        monkeypatch.setattr(auto_topup, "MAX_PER_DAY", 2)
        switch_on_auto_top_ups(top_up, threshold=20_000)
        for number in range(auto_topup.MAX_PER_DAY + 1):
            for _ in range(2):
                auto_topup.run_due()  # the second time a payment is open
            assert automatic_top_ups().count() == min(number + 1, auto_topup.MAX_PER_DAY)
            provider.deliver()

    def test_inserts_nothing_while_an_old_payment_is_open(self, top_up):
        """It would wait for the transaction that ends the payment, which waits for the settings: a deadlock."""
        setup = switch_on_auto_top_ups(top_up)
        auto_topup.run_due()
        automatic_top_ups().update(created_at=timezone.now() - timedelta(days=2))
        with CaptureQueriesContext(connection) as queries:
            assert auto_topup.create_if_due(setup_pk=setup.pk) is None
        assert not [query["sql"] for query in queries if query["sql"].startswith("INSERT")]

    @pytest.mark.parametrize(
        ("when", "hours"),
        [("before", 0), ("after", 30)],
        ids=["the call was lost", "the answer was lost and the key is forgotten"],
    )
    def test_a_network_failure_is_retried_and_charges_once(self, provider, top_up, when, hours):
        switch_on_auto_top_ups(top_up)
        with provider.network_failing(when):
            auto_topup.run_due()
        assert automatic_top_ups().get().state == TopUp.States.CREATED
        automatic_top_ups().update(created_at=timezone.now() - timedelta(hours=hours))
        if hours:
            forget_idempotency_keys(provider)
        for _ in range(2):
            auto_topup.run_due()
        assert automatic_top_ups().get().state == TopUp.States.PENDING
        assert payment_emails.send_due() == 0  # nothing has failed for good
        provider.deliver()
        assert provider.held() == balance(top_up) == 7000

    @pytest.mark.parametrize("reason", ["too old", "switched off", "without the service"])
    def test_a_charge_that_never_arrived_is_given_up(self, provider, top_up, reason):
        switch_on_auto_top_ups(top_up)
        with provider.network_failing():
            auto_topup.run_due()
        if reason == "too old":
            automatic_top_ups().update(created_at=timezone.now() - auto_topup.GIVE_UP_AFTER - timedelta(minutes=1))
        elif reason == "switched off":
            auto_topup.switch_off(account=top_up.account)
        else:
            give_up_service(top_up)
        auto_topup.run_due()
        row = automatic_top_ups().get()
        assert (row.state, row.failure) == (TopUp.States.FAILED, "unanswered")


def test_failures_are_mailed_retried_and_forgotten_after_a_payment_and_the_third_switches_it_off(provider, top_up):
    page = customers.create_card_page(account=top_up.account, email="a@example.com")
    provider.pay(page.rsplit("/", 1)[1], FAILS_LATER)
    provider.deliver()
    setup = switch_on_auto_top_ups(top_up, card=FAILS_LATER)
    for _ in range(3):  # only the first call charges the card: the retry is due an hour later
        auto_topup.run_due()
        provider.deliver()
    setup.refresh_from_db()
    assert (setup.is_on, setup.failures, setup.last_failure) == (True, 1, "generic_decline")
    assert setup.retry_at > timezone.now() + timedelta(minutes=59)  # an hour after the failure
    assert automatic_top_ups().get().state == TopUp.States.FAILED
    assert [payment_emails.send_due() for _ in range(2)] == [1, 0]
    (message,) = mail.outbox
    assert message.to == [top_up.created_by.email]
    for words in ("$20.00", "The bank declined the card.", "retried later"):
        assert words in message.body
    assert balance(top_up) == provider.held() == 5000
    switch_on_auto_top_ups(top_up)  # with the card that works
    auto_topup.run_due()
    provider.deliver()
    setup.refresh_from_db()
    assert (setup.failures, setup.last_failure, balance(top_up)) == (0, "", 7000)
    switch_on_auto_top_ups(top_up, threshold=20_000, card=FAILS_LATER)
    for _ in range(auto_topup.MAX_FAILURES + 2):
        auto_topup.run_due()
        provider.deliver()
        AutoTopUp.objects.update(retry_at=timezone.now())
    paid = automatic_top_ups().get(state=TopUp.States.PAID)
    auto_topup.apply_intent(gateway.fetch_object("payment_intent", paid.payment_intent), livemode=False)  # once more
    setup.refresh_from_db()
    assert (setup.is_on, setup.failures) == (False, auto_topup.MAX_FAILURES)
    assert automatic_top_ups().count() == 2 + auto_topup.MAX_FAILURES  # with the failed and the paid one from above
    payment_emails.send_due()
    assert "now switched off" in mail.outbox[-1].body


@pytest.mark.django_db(transaction=True)
def test_a_second_worker_cannot_begin_a_top_up_before_the_first_has_written_its_row(top_up):
    """Otherwise both would charge the card: the second worker's top-up could be paid before the first has its row."""
    setup = switch_on_auto_top_ups(top_up)
    others = []

    def another_worker():
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '200ms'")
        return auto_topup.create_if_due(setup_pk=setup.pk)

    def meanwhile(execute, sql, *arguments):
        if sql.startswith('INSERT INTO "billing_topup"'):
            others.extend(together(another_worker))
        return execute(sql, *arguments)

    with connection.execute_wrapper(meanwhile):
        assert auto_topup.create_if_due(setup_pk=setup.pk) is not None
    (other,) = others
    assert isinstance(other, OperationalError)
    assert "lock timeout" in str(other)
    assert automatic_top_ups().count() == 1


@pytest.mark.django_db(transaction=True)
def test_a_wallet_is_locked_before_its_settings(provider, top_up, monkeypatch):
    """Disputes and closings lock the wallet first, so the other order in payments and refunds can deadlock."""
    switch_on_auto_top_ups(top_up)
    seen = []

    @transaction.atomic
    def lock_settings():
        """Raise if another thread has locked the settings."""
        return AutoTopUp.objects.select_for_update(nowait=True).get()

    def checked(move_money):
        def check_and_move(**options):
            seen.extend(together(lock_settings))
            return move_money(**options)

        return check_and_move

    monkeypatch.setattr(receivables, "pay_in", checked(receivables.pay_in))
    monkeypatch.setattr(receivables, "withdraw", checked(receivables.withdraw))
    auto_topup.run_due()
    provider.deliver()
    refunds.refund(top_up=top_up, amount_minor=1000, reason="Asked for", user=UserFactory())
    assert len(seen) == 2
    assert raised(seen) == []
