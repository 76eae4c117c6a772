"""An organization's customer at the provider. If it is deleted there, a new one is created once, without its cards."""

from __future__ import annotations

import pytest
from django.core import mail

from billing import auto_topup, customers, payment_emails, payments
from billing.errors import NoSavedCard
from billing.models import AutoTopUp, PaymentCustomer, StripeEvent, TopUp
from tests.billing.paying import balance, switch_on_auto_top_ups
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import paid_top_up
from tests.provider import apply
from tests.racing import raised, together

pytestmark = pytest.mark.django_db


def customer_id(top_up):
    return PaymentCustomer.objects.get(organization=top_up.account.organization).customer_id


def existing_customers(provider):
    return [each["id"] for each in provider.ask("GET", "customers")["data"]]


def delete(provider, top_up):
    """Delete the customer as somebody would at the Dashboard; returns its id."""
    deleted = customer_id(top_up)
    provider.ask("DELETE", f"customers/{deleted}")
    return deleted


def pay(provider, top_up):
    """Pay $7 by the payment page, and save the card."""
    user = top_up.created_by
    fresh = payments.start_top_up(account=top_up.account, amount_minor=700, user=user, save_card=True)
    provider.pay(fresh.session_id)
    provider.deliver()
    fresh.refresh_from_db()
    return fresh


class TestDeleted:
    def test_repeatedly_blocks_no_payment(self, provider, top_up):
        """The provider keeps idempotency keys for a day. None may return a customer that was deleted meanwhile."""
        seen = {customer_id(top_up)}
        for _ in range(3):
            delete(provider, top_up)
            provider.fresh()  # the events of the deletion are lost
            assert pay(provider, top_up).state == TopUp.States.PAID
            seen.add(customer_id(top_up))
            assert existing_customers(provider) == [customer_id(top_up)]
        assert len(seen) == 4
        assert balance(top_up) == 5000 + 3 * 700

    def test_has_no_cards_until_one_is_saved(self, provider, top_up):
        organization = top_up.account.organization
        assert not customers.has_deleted_customer(organization)
        (saved,) = customers.saved_cards(organization)
        customers.make_default(organization=organization, method_id=saved.card.method_id)
        delete(provider, top_up)
        assert customers.saved_cards(organization) == []
        assert customers.has_deleted_customer(organization)
        for act in (customers.make_default, customers.remove_card):
            with pytest.raises(NoSavedCard):
                act(organization=organization, method_id=saved.card.method_id)
        assert PaymentCustomer.objects.get().default_method == ""
        assert existing_customers(provider) == []  # reading creates no customer
        page = customers.create_card_page(account=top_up.account, email="a@example.com")
        provider.pay(page.rsplit("/", 1)[1])
        assert [each.card.last4 for each in customers.saved_cards(organization)] == ["4242"]

    def test_switches_automatic_top_ups_off_with_one_mail(self, provider, top_up):
        switch_on_auto_top_ups(top_up)
        delete(provider, top_up)
        for _ in range(2):
            auto_topup.run_due()
            payment_emails.send_due()
        setup = AutoTopUp.objects.get()
        assert (setup.is_on, setup.last_failure) == (False, "customer_gone")
        (message,) = mail.outbox
        for words in ("switched off", "Add a card again", "/wallet/cards/"):
            assert words in message.body
        assert not TopUp.objects.filter(state=TopUp.States.CREATED).exists()

    def test_after_a_charge_whose_answer_was_lost_credits_it_once(self, provider, top_up):
        switch_on_auto_top_ups(top_up)
        with provider.network_failing("after"):
            auto_topup.run_due()
        delete(provider, top_up)
        events = provider.fresh()
        auto_topup.run_due()
        provider.deliver(*events)
        auto_topup.run_due()
        assert balance(top_up) == provider.held() == 7000
        assert not AutoTopUp.objects.get().is_on


def test_a_card_removed_at_the_dashboard_switches_automatic_top_ups_off_at_once(provider, top_up):
    setup = switch_on_auto_top_ups(top_up)
    provider.ask("POST", f"payment_methods/{setup.method_id}/detach")
    auto_topup.run_due()
    setup.refresh_from_db()
    assert (setup.is_on, setup.last_failure) == (False, "card_gone")
    payment_emails.send_due()
    assert "no longer saved" in mail.outbox[0].body


class TestEvent:
    def test_is_applied_in_its_own_mode_only_and_if_the_provider_confirms_it(self, provider, top_up):
        switch_on_auto_top_ups(top_up)
        event = {"id": "evt_1", "type": "customer.deleted", "livemode": False}
        event["data"] = {"object": {"id": customer_id(top_up), "object": "customer"}}
        assert apply(event).state == StripeEvent.States.IGNORED  # the provider still has the customer
        deleted = delete(provider, top_up)
        (event,) = [event for event in provider.fresh() if event["type"] == "customer.deleted"]
        assert apply(event | {"id": "evt_live", "livemode": True}).state == StripeEvent.States.QUARANTINED
        assert customer_id(top_up) == deleted
        assert apply(event).state == StripeEvent.States.APPLIED
        customer = PaymentCustomer.objects.get()
        assert (customer.customer_id, customer.lost_id) == ("", deleted)
        assert not AutoTopUp.objects.get().is_on

    def test_that_comes_late_or_twice_leaves_the_new_customer_alone(self, provider, top_up):
        delete(provider, top_up)
        (event,) = [event for event in provider.fresh() if event["type"] == "customer.deleted"]
        pay(provider, top_up)
        switch_on_auto_top_ups(top_up, threshold=10)  # the wallet has more
        known = customer_id(top_up)
        for number in range(2):
            assert apply(event | {"id": f"evt_{number}"}).state == StripeEvent.States.IGNORED
        assert customer_id(top_up) == known
        assert AutoTopUp.objects.get().is_on


@pytest.mark.django_db(transaction=True)
def test_payments_at_once_use_one_customer(provider):
    """The idempotency key depends on the member's email address, so the provider may create several; one is stored."""
    top_up = paid_top_up(provider)
    delete(provider, top_up)
    organization = top_up.account.organization
    users = [MembershipFactory(organization=organization).user for _ in range(3)]
    start = lambda user: payments.start_top_up(account=top_up.account, amount_minor=700, user=user)
    started = together(*[lambda user=user: start(user) for user in users])
    assert raised(started) == []
    sessions = [provider.sandbox.session(each.session_id) for each in started]
    assert {session["customer"] for session in sessions} == {customer_id(top_up)}
    for each in started:
        provider.pay(each.session_id)
    provider.deliver()
    assert balance(top_up) == provider.held() == 5000 + 3 * 700
