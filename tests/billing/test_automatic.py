"""Automatic top-ups: begun when due, charged once whatever is repeated, and switched off when they keep failing."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core import mail
from django.db import OperationalError, connection
from django.utils import timezone

from billing import automatic, customers, payment_mails
from billing.errors import AmountRefused, NoSavedCard
from billing.models import AutoTopUp, TopUp
from console.accounts.models import ServiceActivation
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import paid_top_up
from tests.provider import FAILS_LATER, GOOD, lost
from tests.racing import raised, together

pytestmark = pytest.mark.django_db


def saver(provider, card=GOOD):
    """An organization with $50 in its wallet and a saved card."""
    top_up = paid_top_up(provider)
    if card != GOOD:
        page = customers.save_card_page(account=top_up.account, email="a@example.com")
        provider.pay(page.rsplit("/", 1)[1], card)
        provider.deliver()
    return top_up


def switch_on(top_up, threshold=6000, amount=2000, card=GOOD):
    saved = customers.saved_cards(top_up.account.organization)
    chosen = next(each.card for each in saved if each.card.last4 == card[-4:])
    return automatic.switch_on(
        account=top_up.account, threshold_minor=threshold, amount_minor=amount,
        method_id=chosen.method_id, user=top_up.created_by,
    )  # fmt: skip


def balance(top_up):
    top_up.account.refresh_from_db()
    return top_up.account.posted_minor


def automatics():
    return TopUp.objects.filter(origin=TopUp.Origins.AUTOMATIC)


def test_who_has_given_up_the_service_is_charged_no_more(provider):
    top_up = saver(provider)
    switch_on(top_up)
    activation = ServiceActivation.objects.create(
        organization=top_up.account.organization,
        terms_version="1",
        activated_at=timezone.now(),
        deactivated_at=timezone.now(),
    )
    assert automatic.sweep() == 0
    assert automatic.begin(setup_pk=AutoTopUp.objects.get().pk) is None
    assert not automatics().exists()
    activation.deactivated_at = None
    activation.save()
    assert automatic.sweep() == 1
    provider.deliver()
    assert balance(top_up) == 7000


class TestSwitchingOn:
    def test_keeps_the_card_and_who_agreed(self, provider):
        top_up = saver(provider)
        setup = switch_on(top_up)
        assert (setup.is_on, setup.method_label, setup.set_by) == (True, "Visa •••• 4242", top_up.created_by)

    @pytest.mark.parametrize(
        ("threshold", "amount", "field"),
        [(0, 2000, "threshold_minor"), (20_001, 2000, "threshold_minor"), (100, 499, "amount_minor")],
    )
    def test_refuses_amounts_that_make_no_sense(self, provider, threshold, amount, field):
        top_up = saver(provider)
        with pytest.raises(AmountRefused) as caught:
            switch_on(top_up, threshold, amount)
        assert field in caught.value.fields

    def test_with_the_card_of_somebody_else(self, provider):
        mine, theirs = saver(provider), saver(provider)
        (card,) = customers.saved_cards(theirs.account.organization)
        with pytest.raises(NoSavedCard):
            automatic.switch_on(
                account=mine.account, threshold_minor=1000, amount_minor=1000,
                method_id=card.card.method_id, user=mine.created_by,
            )  # fmt: skip


class TestTheSweep:
    def test_tops_up_below_the_threshold_and_no_more(self, provider):
        top_up = saver(provider)
        switch_on(top_up, threshold=6000, amount=2000)
        for _ in range(3):
            automatic.sweep()
            provider.deliver()
        assert balance(top_up) == 7000
        assert provider.held() == 7000
        assert automatics().get().state == TopUp.States.PAID

    def test_leaves_a_wallet_with_enough_alone(self, provider):
        switch_on(saver(provider), threshold=5000)
        assert automatic.sweep() == 0

    def test_leaves_one_that_is_off_alone(self, provider):
        top_up = saver(provider)
        switch_on(top_up)
        automatic.switch_off(account=top_up.account)
        assert automatic.sweep() == 0

    def test_waits_for_the_money_before_it_begins_another(self, provider):
        top_up = saver(provider)
        switch_on(top_up, threshold=20_000, amount=2000)
        automatic.sweep()
        automatic.sweep()
        assert automatics().count() == 1

    def test_stops_after_so_many_a_day(self, provider):
        top_up = saver(provider)
        switch_on(top_up, threshold=20_000, amount=2000)
        for _ in range(automatic.MOST_A_DAY + 3):
            automatic.sweep()
            provider.deliver()
        assert automatics().count() == automatic.MOST_A_DAY

    @pytest.mark.parametrize("hours", [0, 30])
    def test_an_answer_that_was_lost_charges_nothing_more(self, provider, hours):
        """Also when the provider has forgotten the key meanwhile."""
        top_up = saver(provider)
        switch_on(top_up)
        provider.wire.after = lambda method, path: lost() if (method, path) == ("POST", "/v1/payment_intents") else None
        automatic.sweep()
        assert automatics().get().state == TopUp.States.CREATED
        provider.wire.after = lambda *_call: None
        automatics().update(created_at=timezone.now() - timedelta(hours=hours))
        for key in list(provider.provider.book.store._objects["key"]) if hours else ():
            provider.provider.book.store.remove("key", key)
        for _ in range(2):
            automatic.sweep()
        assert automatics().get().state == TopUp.States.PENDING  # it was asked about, and not given up
        assert payment_mails.send_due() == 0
        provider.deliver()
        assert provider.held() == balance(top_up) == 7000

    def test_a_call_that_never_arrived_is_made_again(self, provider):
        top_up = saver(provider)
        switch_on(top_up)
        provider.wire.before = lost
        automatic.sweep()
        provider.wire.before = lambda *_call: None
        automatic.sweep()
        provider.deliver()
        assert provider.held() == balance(top_up) == 7000

    def test_a_call_that_could_not_be_made_for_long_is_given_up(self, provider):
        top_up = saver(provider)
        switch_on(top_up)
        provider.wire.before = lost
        automatic.sweep()
        provider.wire.before = lambda *_call: None
        automatics().update(created_at=timezone.now() - automatic.WORTH_TRYING - timedelta(minutes=1))
        automatic.sweep()
        row = automatics().order_by("created_at").first()
        assert (row.state, row.failure) == (TopUp.States.FAILED, "unanswered")


class TestFailing:
    def test_is_told_by_mail_once_and_tried_again_later(self, provider):
        top_up = saver(provider, FAILS_LATER)
        setup = switch_on(top_up, card=FAILS_LATER)
        for _ in range(3):
            automatic.sweep()
            provider.deliver()
        setup.refresh_from_db()
        assert (setup.is_on, setup.failures, setup.last_failure) == (True, 1, "generic_decline")
        assert setup.retry_at > timezone.now() + timedelta(minutes=59)
        assert automatics().get().state == TopUp.States.FAILED
        assert payment_mails.send_due() == 1
        assert payment_mails.send_due() == 0
        (letter,) = mail.outbox
        assert letter.to == [top_up.created_by.email]
        assert "$20.00" in letter.body
        assert "The bank declined the card." in letter.body
        assert "tried again later" in letter.body
        assert balance(top_up) == provider.held() == 5000

    def test_so_often_switches_it_off(self, provider):
        top_up = saver(provider, FAILS_LATER)
        setup = switch_on(top_up, card=FAILS_LATER)
        for _ in range(automatic.MOST_FAILURES + 2):
            automatic.sweep()
            provider.deliver()
            AutoTopUp.objects.update(retry_at=timezone.now())
        setup.refresh_from_db()
        assert (setup.is_on, setup.failures) == (False, automatic.MOST_FAILURES)
        assert automatics().count() == automatic.MOST_FAILURES
        payment_mails.send_due()
        assert "switched off now" in mail.outbox[-1].body

    def test_is_forgotten_when_a_card_works_again(self, provider):
        top_up = saver(provider, FAILS_LATER)
        setup = switch_on(top_up, card=FAILS_LATER)
        automatic.sweep()
        switch_on(top_up)
        automatic.sweep()
        provider.deliver()
        setup.refresh_from_db()
        assert (setup.failures, setup.last_failure) == (0, "")
        assert balance(top_up) == 7000


class TestCards:
    def test_the_default_is_first_and_can_be_changed(self, provider):
        top_up = saver(provider, FAILS_LATER)
        organization = top_up.account.organization
        last4 = lambda: [each.card.last4 for each in customers.saved_cards(organization)]
        before = last4()
        other = customers.saved_cards(organization)[1].card
        customers.make_default(organization=organization, method_id=other.method_id)
        assert last4() == before[::-1]

    def test_removing_one_switches_off_what_uses_it(self, provider):
        top_up = saver(provider)
        setup = switch_on(top_up)
        customers.remove_card(organization=top_up.account.organization, method_id=setup.method_id)
        setup.refresh_from_db()
        assert not setup.is_on
        assert customers.saved_cards(top_up.account.organization) == []

    def test_of_another_organization_cannot_be_touched(self, provider):
        mine, theirs = saver(provider), saver(provider)
        (card,) = customers.saved_cards(theirs.account.organization)
        for act in (customers.make_default, customers.remove_card):
            with pytest.raises(NoSavedCard):
                act(organization=mine.account.organization, method_id=card.card.method_id)
        assert len(customers.saved_cards(theirs.account.organization)) == 1

    def test_nothing_is_asked_for_an_organization_that_never_paid(self, provider):
        assert customers.saved_cards(MembershipFactory().organization) == []
        assert provider.wire.calls == []


@pytest.mark.django_db(transaction=True)
def test_ten_sweeps_at_once_charge_once(provider):
    top_up = saver(provider)
    switch_on(top_up, threshold=6000, amount=2000)
    assert raised(together(*[automatic.sweep] * 10)) == []
    provider.deliver()
    assert provider.held() == balance(top_up) == 7000
    assert automatics().count() == 1


@pytest.mark.django_db(transaction=True)
def test_nobody_begins_one_between_anothers_look_and_its_row(provider):
    """Else the other's could be paid in between, and this one would come on top of it."""
    top_up = saver(provider)
    setup = switch_on(top_up, threshold=6000, amount=2000)
    others = []

    def another_worker():
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '200ms'")
        return automatic.begin(setup_pk=setup.pk)

    def meanwhile(execute, sql, *arguments):
        if sql.startswith('INSERT INTO "billing_topup"'):
            others.extend(together(another_worker))
        return execute(sql, *arguments)

    with connection.execute_wrapper(meanwhile):
        assert automatic.begin(setup_pk=setup.pk) is not None
    (other,) = others
    assert isinstance(other, OperationalError)
    assert "lock timeout" in str(other)
    assert automatics().count() == 1
