"""Pages of saved cards, automatic top-ups, and paying for a quote, with a fake of the payment provider."""

import pytest
from django.urls import reverse

from billing import customers, receivables
from billing.models import AutoTopUp, TopUp
from console.accounts.roles import Role
from jobs import checkout, orders
from jobs.models import Order
from tests.factories.accounts import MembershipFactory
from tests.provider import DECLINED, GOOD, fail_network

pytestmark = pytest.mark.django_db


def cards_page(client):
    return client.get(reverse("card_list")).content.decode()


def pay_at(provider, url, card=GOOD):
    """Pay at the provider's page, to which the console redirected."""
    provider.pay(url.rsplit("/", 1)[1], card)


def save_card(client, provider):
    pay_at(provider, client.post(reverse("card_add")).url)


@pytest.fixture
def saved_card(customer, owner_page, provider):
    """The owner's saved card."""
    save_card(owner_page, provider)
    provider.deliver()  # so that a test delivers only its own events; the cards are read from the provider
    return customers.saved_cards(customer.organization)[0].card


def switch_on(client, card, **changes):
    """Switch on automatic top-ups from the card: of 50, below 20."""
    form = {"threshold_minor": "20", "amount_minor": "50", "method": card.method_id} | changes
    return client.post(reverse("card_list"), form)


def test_a_card_is_saved_at_the_provider_and_removed_with_its_automatic_top_ups(owner_page, customer, provider):
    assert "No saved cards" in cards_page(owner_page)
    save_card(owner_page, provider)
    assert "Visa •••• 4242" in cards_page(owner_page)
    card = customers.saved_cards(customer.organization)[0].card
    assert switch_on(owner_page, card, amount_minor="50,00").status_code == 302
    setup = AutoTopUp.objects.get()
    assert (setup.is_on, setup.threshold_minor, setup.amount_minor) == (True, 2000, 5000)
    owner_page.post(reverse("automatic_top_up_off"))
    assert not AutoTopUp.objects.get().is_on
    switch_on(owner_page, card)
    owner_page.post(reverse("card_remove"), {"method": card.method_id})
    assert "No saved cards" in cards_page(owner_page)
    assert not AutoTopUp.objects.get().is_on


def test_a_card_cannot_be_removed_by_another_organization_or_added_while_the_provider_does_not_answer(
    owner_page, saved_card, browser, provider
):
    stranger = browser(MembershipFactory(role=Role.OWNER))
    # The redirect leads to their own cards, where the error is shown.
    assert stranger.post(reverse("card_remove"), {"method": saved_card.method_id}).url == reverse("card_list")
    assert "Visa •••• 4242" in cards_page(owner_page)
    provider.wire.before = fail_network
    assert "did not answer" in cards_page(owner_page)
    assert owner_page.post(reverse("card_add")).url == reverse("card_list")  # not the provider's page


@pytest.mark.parametrize("has_auto_top_ups", [True, False])
def test_cards_that_were_deleted_at_the_provider_are_reported_once(
    owner_page, customer, saved_card, provider, has_auto_top_ups
):
    if has_auto_top_ups:
        switch_on(owner_page, saved_card)
    (provider_customer,) = provider.ask("GET", "customers")["data"]
    provider.ask("DELETE", f"customers/{provider_customer['id']}")
    provider.deliver()
    text = cards_page(owner_page)
    assert text.count("were deleted at the payment provider") == 1
    assert "Choose a working card" not in text
    assert ("were switched off" in text) == has_auto_top_ups
    save_card(owner_page, provider)
    text = cards_page(owner_page)
    assert "Visa •••• 4242" in text
    assert ("were deleted" in text) == has_auto_top_ups  # until automatic top-ups are switched on again
    if has_auto_top_ups:
        switch_on(owner_page, customers.saved_cards(customer.organization)[0].card)
        assert "were deleted" not in cards_page(owner_page)


def test_automatic_top_ups_with_invalid_values_are_refused(owner_page, saved_card):
    for changes, sentence in (
        ({"amount_minor": "1"}, "A top-up must be between $5.00 and $10,000.00."),
        ({"threshold_minor": "0"}, "The threshold must be between"),
        ({"amount_minor": "a lot"}, "Enter an amount such as 50 or 19.90"),
        ({"threshold_minor": "1,000"}, "without thousands separators."),
        ({"method": "pm_another"}, "Add a card first."),
    ):
        answer = switch_on(owner_page, saved_card, **changes)
        assert (answer.status_code, sentence in answer.content.decode()) == (422, True), changes
    assert not AutoTopUp.objects.exists()
    switch_on(owner_page, saved_card)
    # As the third failure leaves automatic top-ups.
    AutoTopUp.objects.update(is_on=False, failures=3, last_failure="expired_card")
    assert "were switched off" in cards_page(owner_page)
    assert "The card has expired." in cards_page(owner_page)


def test_a_card_is_saved_when_the_box_is_ticked(owner_page, customer, provider):
    for box, count in (({}, 0), ({"save_card": "1"}, 1)):
        pay_at(provider, owner_page.post(reverse("top_up"), {"amount": "20"} | box).url)
        assert len(customers.saved_cards(customer.organization)) == count


def take_back(account, amount_minor):
    """Withdraw an amount, as a refund does. If it is more than the wallet has, the rest is owed."""
    receivables.withdraw(
        account=account, amount_minor=amount_minor, reference=f"take {amount_minor}", kind="refund", description="Out"
    )


@pytest.fixture
def quote(customer):
    """A quote that the empty wallet can't pay."""
    take_back(customer.wallet, customer.wallet.posted_minor)
    ten_hours = customer.form(max_seconds=36_000)  # on two nodes: $18
    return orders.quote_order(membership=customer.membership, data=ten_hours)


def pay_quote(client, quote, provider, card=GOOD):
    pay_at(provider, client.post(reverse("training_pay"), {"quote": quote.pk}).headers["HX-Redirect"], card)
    return TopUp.objects.filter(quote=quote).latest("pk")


def return_from_payment(client, quote):
    return client.get(reverse("training_paid", args=[quote.pk]) + "?paid=1")


def test_a_quote_is_bought_once_its_payment_arrives(owner_page, quote, provider):
    smallest_top_up = 500
    assert pay_quote(owner_page, quote, provider).amount_minor == max(quote.ceiling_minor, smallest_top_up)
    assert "is being processed" in return_from_payment(owner_page, quote).content.decode()
    assert not Order.objects.exists()
    provider.deliver()
    for _ in range(2):
        assert return_from_payment(owner_page, quote).url == reverse("job_detail", args=[Order.objects.get().job.pk])
    assert Order.objects.get().quote == quote


def test_a_paid_quote_is_bought_although_its_page_was_closed_but_not_after_a_declined_payment(
    owner_page, quote, provider
):
    pay_quote(owner_page, quote, provider, DECLINED)
    provider.deliver()
    checkout.buy_paid()  # the periodic task, which calls `buy_all`
    assert not Order.objects.exists()
    page = owner_page.get(reverse("training_paid", args=[quote.pk])).content.decode()
    assert "Nothing was charged" in page
    pay_quote(owner_page, quote, provider)
    provider.deliver()
    assert (checkout.buy_all(), checkout.buy_all()) == (1, 0)
    assert Order.objects.get().quote == quote


def test_a_purchase_that_fails_keeps_no_other_from_being_bought(owner_page, customer, quote, provider, monkeypatch):
    place_order = checkout.orders.place_order
    other = customer.quote()

    def fail_first(*, membership, quote):
        if quote != other:
            raise OSError("The workspace cannot be read.")
        return place_order(membership=membership, quote=quote)

    monkeypatch.setattr(checkout.orders, "place_order", fail_first)
    for each in (quote, other):
        pay_quote(owner_page, each, provider)
    provider.deliver()
    assert checkout.buy_all() == 1
    assert Order.objects.get().quote == other


def test_the_payment_for_an_expired_quote_stays_in_the_wallet(owner_page, customer, quote, provider):
    top_up = pay_quote(owner_page, quote, provider)
    provider.deliver()
    type(quote).objects.update(expires_at=quote.created_at)
    assert "Payment received, but nothing was ordered" in return_from_payment(owner_page, quote).content.decode()
    assert customer.wallet.posted_minor == top_up.amount_minor
    assert checkout.buy_all() == 0


def test_a_debt_is_shown_in_the_wallet_and_paid_first(owner_page, customer, quote):
    take_back(customer.wallet, 700)
    assert "$7.00 owed" in owner_page.get(reverse("wallet")).content.decode()
    type(quote).objects.update(expires_at=quote.created_at)  # it cannot be paid, so the answer shows its amounts
    text = owner_page.post(reverse("training_pay"), {"quote": quote.pk}).content.decode()
    assert "Owed (paid first)" in text
    assert "$7.00" in text
