"""An organization's record at the provider: deleted there by somebody, it is made again, once; its cards are gone."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core import mail
from django.utils import timezone

from billing import automatic, customers, gateway, payment_mails, payments
from billing.errors import CustomerGone, NoSavedCard, PaymentRefused
from billing.models import AutoTopUp, PaymentCustomer, StripeEvent, TopUp
from console.accounts.models import User
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import paid_top_up
from tests.provider import apply, lost
from tests.racing import raised, together

pytestmark = pytest.mark.django_db


def theirs(top_up):
    return PaymentCustomer.objects.get(organization=top_up.account.organization).customer_id


def living(provider):
    return provider.ask("GET", "customers")["data"]


def delete(provider, top_up):
    """Somebody deletes the record at the Dashboard."""
    gone = theirs(top_up)
    provider.ask("DELETE", f"customers/{gone}")
    return gone


def pay_again(provider, top_up):
    """A payment by page, after whatever happened."""
    account = top_up.account
    fresh = payments.start_top_up(account=account, amount_minor=700, user=top_up.created_by, save_card=True)
    provider.pay(fresh.session_id)
    provider.deliver()
    fresh.refresh_from_db()
    return fresh


def standing_order(top_up, threshold=6000):
    (saved,) = customers.saved_cards(top_up.account.organization)
    return automatic.switch_on(
        account=top_up.account, threshold_minor=threshold, amount_minor=2000,
        method_id=saved.card.method_id, user=top_up.created_by,
    )  # fmt: skip


class TestDeleted:
    def test_blocks_no_payment(self, provider):
        top_up = paid_top_up(provider)
        gone = delete(provider, top_up)
        provider.fresh()  # what was told of it is lost
        assert pay_again(provider, top_up).state == TopUp.States.PAID
        assert theirs(top_up) != gone
        top_up.account.refresh_from_db()
        assert top_up.account.posted_minor == 5700
        assert [each["id"] for each in living(provider)] == [theirs(top_up)]

    def test_again_and_again(self, provider):
        """Within a day of each other: no key may give back the record that is gone."""
        top_up = paid_top_up(provider)
        seen = {theirs(top_up)}
        for _ in range(3):
            delete(provider, top_up)
            assert pay_again(provider, top_up).state == TopUp.States.PAID
            seen.add(theirs(top_up))
        assert len(seen) == 4

    def test_before_it_was_ever_used(self, provider):
        """The answer of the making was lost, and the record deleted: the same key gives what is gone."""
        member = MembershipFactory()
        provider.wire.after = lost
        with pytest.raises(Exception, match="did not answer"):
            customers.customer_of(organization=member.organization, email=member.user.email)
        provider.wire.after = lambda *_call: None
        (made,) = living(provider)
        provider.ask("DELETE", f"customers/{made['id']}")
        cards = customers.for_customer(organization=member.organization, email=member.user.email, act=gateway.cards)
        assert cards == []
        (fresh,) = living(provider)
        assert PaymentCustomer.objects.get().customer_id == fresh["id"] != made["id"]

    def test_saves_cards_again(self, provider):
        top_up = paid_top_up(provider)
        delete(provider, top_up)
        page = customers.save_card_page(account=top_up.account, email="a@example.com")
        provider.pay(page.rsplit("/", 1)[1])
        organization = top_up.account.organization
        assert [each.card.last4 for each in customers.saved_cards(organization)] == ["4242"]

    def test_has_no_cards_and_says_so(self, provider):
        top_up = paid_top_up(provider)
        organization = top_up.account.organization
        assert not customers.were_lost(organization)
        (saved,) = customers.saved_cards(organization)
        customers.make_default(organization=organization, method_id=saved.card.method_id)
        delete(provider, top_up)
        assert customers.saved_cards(organization) == []
        assert customers.were_lost(organization)
        for act in (customers.make_default, customers.remove_card):
            with pytest.raises(NoSavedCard):
                act(organization=organization, method_id=saved.card.method_id)
        assert PaymentCustomer.objects.get().default_method == ""
        assert living(provider) == []  # looking makes no record

    def test_switches_automatic_top_ups_off_and_tells_by_mail_once(self, provider):
        top_up = paid_top_up(provider)
        standing_order(top_up)
        delete(provider, top_up)
        for _ in range(2):
            automatic.sweep()
            payment_mails.send_due()
        setup = AutoTopUp.objects.get()
        assert (setup.is_on, setup.last_failure) == (False, "customer_gone")
        (letter,) = mail.outbox
        assert "switched off" in letter.body
        assert "Save a card again" in letter.body
        assert "/wallet/cards/" in letter.body
        assert not TopUp.objects.filter(state=TopUp.States.CREATED).exists()

    def test_one_that_was_off_is_told_of_nothing(self, provider):
        top_up = paid_top_up(provider)
        standing_order(top_up)
        automatic.switch_off(account=top_up.account)
        delete(provider, top_up)
        provider.deliver()
        payment_mails.send_due()
        assert mail.outbox == []

    def test_a_new_standing_order_is_told_of_again(self, provider):
        top_up = paid_top_up(provider)
        for count in (1, 2):
            standing_order(top_up, threshold=10)
            delete(provider, top_up)
            provider.deliver()
            payment_mails.send_due()
            assert len(mail.outbox) == count
            pay_again(provider, top_up)
        assert AutoTopUp.objects.get().is_on is False

    def test_an_answer_that_was_lost_before_is_credited_all_the_same(self, provider):
        """The card was charged, nobody here heard, and the record was deleted: the money comes in once."""
        top_up = paid_top_up(provider)
        standing_order(top_up)
        provider.wire.after = lost
        automatic.sweep()
        provider.wire.after = lambda *_call: None
        delete(provider, top_up)
        told = provider.fresh()
        automatic.sweep()
        provider.deliver(*told)
        automatic.sweep()
        top_up.account.refresh_from_db()
        assert top_up.account.posted_minor == provider.held() == 7000
        assert not AutoTopUp.objects.get().is_on

    def test_what_is_refused_for_another_reason_makes_no_record(self, provider):
        top_up = paid_top_up(provider)
        with pytest.raises(PaymentRefused) as caught:
            customers.for_customer(
                organization=top_up.account.organization,
                email="a@example.com",
                act=lambda customer: gateway.charge_card(
                    reference="1",
                    customer=customer,
                    method_id="pm_unknown",
                    amount_minor=500,
                    currency="USD",
                    title="x",
                ),
            )
        assert not isinstance(caught.value, CustomerGone)
        assert len(living(provider)) == 1


class TestCardGone:
    def test_switches_its_standing_order_off_at_once(self, provider):
        """Removed at the Dashboard: to ask three times would say the same."""
        top_up = paid_top_up(provider)
        setup = standing_order(top_up)
        provider.ask("POST", f"payment_methods/{setup.method_id}/detach")
        automatic.sweep()
        setup.refresh_from_db()
        assert (setup.is_on, setup.last_failure) == (False, "card_gone")
        payment_mails.send_due()
        (letter,) = mail.outbox
        assert "not saved any more" in letter.body


class TestEvent:
    def test_is_taken_in(self, provider):
        top_up = paid_top_up(provider)
        standing_order(top_up)
        gone = delete(provider, top_up)
        (row,) = [row for row in provider.deliver() if row.type == "customer.deleted"]
        assert row.state == StripeEvent.States.APPLIED
        customer = PaymentCustomer.objects.get()
        assert (customer.customer_id, customer.lost_id) == ("", gone)
        assert not AutoTopUp.objects.get().is_on

    def test_that_comes_late_or_twice_takes_nothing_of_the_new_one(self, provider):
        top_up = paid_top_up(provider)
        delete(provider, top_up)
        (told,) = [event for event in provider.fresh() if event["type"] == "customer.deleted"]
        pay_again(provider, top_up)
        standing_order(top_up, threshold=10)
        known = theirs(top_up)
        for again in (False, True):
            assert apply(told | {"id": f"evt_{again}"}).state == StripeEvent.States.IGNORED
        assert theirs(top_up) == known
        assert AutoTopUp.objects.get().is_on

    def test_is_believed_only_when_the_provider_says_so_too(self, provider):
        top_up = paid_top_up(provider)
        known = theirs(top_up)
        forged = {"id": "evt_1", "type": "customer.deleted", "livemode": False}
        event = forged | {"data": {"object": {"id": known, "object": "customer"}}}
        assert apply(event).state == StripeEvent.States.IGNORED
        assert theirs(top_up) == known

    @pytest.mark.parametrize(
        "thing", [{"object": "customer", "id": "cus_unknown"}, {"object": "charge", "id": "x"}, {}]
    )
    def test_of_nobody_we_know(self, provider, thing):
        row = apply({"id": "evt_1", "type": "customer.deleted", "livemode": False, "data": {"object": thing}})
        assert row.state in {StripeEvent.States.IGNORED, StripeEvent.States.QUARANTINED}

    def test_of_another_mode_takes_nothing(self, provider):
        top_up = paid_top_up(provider)
        delete(provider, top_up)
        (told,) = [event for event in provider.fresh() if event["type"] == "customer.deleted"]
        assert apply(told | {"livemode": True}).state == StripeEvent.States.QUARANTINED
        assert theirs(top_up)


@pytest.mark.django_db(transaction=True)
def test_two_payments_at_once_after_it_make_one_record(provider):
    top_up = paid_top_up(provider)
    delete(provider, top_up)
    begin = lambda: payments.start_top_up(account=top_up.account, amount_minor=700, user=top_up.created_by)
    made = together(*[begin] * 4)
    assert raised(made) == []
    assert [each["id"] for each in living(provider)] == [theirs(top_up)]
    for each in made:
        provider.pay(each.session_id)
    provider.deliver()
    top_up.account.refresh_from_db()
    assert top_up.account.posted_minor == provider.held() == 5000 + 4 * 700


@pytest.mark.django_db(transaction=True)
def test_two_members_at_once_end_with_one_record(provider):
    """Their addresses differ, so the provider may make two; both pay into the one that counts."""
    top_up = paid_top_up(provider)
    delete(provider, top_up)
    members = [MembershipFactory(organization=top_up.account.organization).user for _ in range(3)]
    calls = [
        lambda user=user: payments.start_top_up(account=top_up.account, amount_minor=700, user=user) for user in members
    ]
    made = together(*calls)
    assert raised(made) == []
    sessions = [provider.provider.session(each.session_id) for each in made]
    assert {session["customer"] for session in sessions} == {theirs(top_up)}


def test_an_old_mail_is_no_news(provider):
    top_up = paid_top_up(provider)
    standing_order(top_up)
    delete(provider, top_up)
    provider.deliver()
    AutoTopUp.objects.update(updated_at=timezone.now() - payment_mails.LATEST - timedelta(minutes=1))
    assert payment_mails.send_due() == 0
    assert User.objects.exists()
