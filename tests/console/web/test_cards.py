"""Saved cards, automatic top-ups, and paying for a quote: pages in front of the sandbox."""

from __future__ import annotations

import pytest
from django.urls import reverse

from billing import customers, receivables
from billing.models import AutoTopUp, TopUp
from console.accounts.roles import Role
from jobs import orders, paid
from jobs.models import Order
from tests.factories.accounts import MembershipFactory
from tests.provider import DECLINED, GOOD, lost

pytestmark = pytest.mark.django_db


@pytest.fixture
def saved(customer, provider):
    """The owner's saved card."""
    page = customers.save_card_page(account=customer.wallet, email="a@example.com")
    provider.pay(page.rsplit("/", 1)[1])
    provider.deliver()
    return customers.saved_cards(customer.organization)[0].card


def switch_on(page, card, **changes):
    return page.post(
        reverse("card_list"), {"threshold_minor": "20", "amount_minor": "50", "method": card.method_id} | changes
    )


class TestCards:
    def test_are_saved_at_the_providers_page(self, owner_page, customer, provider):
        assert "No card is saved" in owner_page.get(reverse("card_list")).content.decode()
        answer = owner_page.post(reverse("card_add"))
        assert answer.status_code == 302
        provider.pay(answer.url.rsplit("/", 1)[1])
        assert "Visa •••• 4242" in owner_page.get(reverse("card_list")).content.decode()

    def test_are_removed(self, owner_page, customer, saved):
        switch_on(owner_page, saved)
        owner_page.post(reverse("card_remove"), {"method": saved.method_id})
        assert "No card is saved" in owner_page.get(reverse("card_list")).content.decode()
        assert not AutoTopUp.objects.get().is_on

    def test_of_others_stay(self, owner_page, saved, browser):
        stranger = browser(MembershipFactory(role=Role.OWNER))
        assert stranger.post(reverse("card_remove"), {"method": saved.method_id}).status_code in {302, 403}
        assert "Visa •••• 4242" in owner_page.get(reverse("card_list")).content.decode()

    def test_while_the_provider_is_away(self, owner_page, saved, provider):
        provider.wire.before = lost
        answer = owner_page.get(reverse("card_list"))
        assert answer.status_code == 200
        assert "did not answer" in answer.content.decode()
        assert owner_page.post(reverse("card_add")).url == reverse("card_list")

    @pytest.mark.parametrize("automatic", [True, False])
    def test_that_were_deleted_at_the_provider(self, owner_page, customer, saved, provider, automatic):
        """It is said once, and the page goes on working."""
        if automatic:
            switch_on(owner_page, saved)
        (theirs,) = provider.ask("GET", "customers")["data"]
        provider.ask("DELETE", f"customers/{theirs['id']}")
        provider.deliver()
        text = owner_page.get(reverse("card_list")).content.decode()
        assert text.count("were deleted at the payment service") == 1
        assert "Choose a card that works" not in text
        assert ("were switched off" in text) == automatic
        provider.pay(owner_page.post(reverse("card_add")).url.rsplit("/", 1)[1])
        text = owner_page.get(reverse("card_list")).content.decode()
        assert "Visa •••• 4242" in text
        assert ("were deleted" in text) == automatic  # until they are switched on again
        if automatic:
            switch_on(owner_page, customers.saved_cards(customer.organization)[0].card)
            assert "were deleted" not in owner_page.get(reverse("card_list")).content.decode()

    @pytest.mark.parametrize("role", [Role.MEMBER, Role.VIEWER])
    def test_are_for_those_who_may_pay(self, customer, browser, role):
        member = browser(MembershipFactory(organization=customer.organization, role=role))
        assert member.get(reverse("card_list")).status_code == 403
        for name in ("card_add", "card_default", "card_remove", "card_automatic_off"):
            assert member.post(reverse(name)).status_code == 403


class TestAutomatic:
    def test_is_switched_on_and_off(self, owner_page, saved):
        assert switch_on(owner_page, saved, amount_minor="50,00").status_code == 302
        setup = AutoTopUp.objects.get()
        assert (setup.is_on, setup.threshold_minor, setup.amount_minor) == (True, 2000, 5000)
        owner_page.post(reverse("card_automatic_off"))
        assert not AutoTopUp.objects.get().is_on

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"amount_minor": "1"}, "Top up between $5.00 and $10,000.00 at once."),
            ({"threshold_minor": "0"}, "Give a threshold between"),
            ({"amount_minor": "a lot"}, "Give an amount such as 50 or 19.90"),
            ({"threshold_minor": "1,000"}, "without marks between thousands."),
            ({"method": "pm_another"}, "Save a card first."),
        ],
    )
    def test_says_what_is_wrong(self, owner_page, saved, changes, sentence):
        answer = switch_on(owner_page, saved, **changes)
        assert answer.status_code == 422
        assert sentence in answer.content.decode()
        assert not AutoTopUp.objects.exists()

    def test_says_why_it_failed(self, owner_page, saved):
        switch_on(owner_page, saved)
        AutoTopUp.objects.update(is_on=False, failures=3, last_failure="expired_card")
        text = owner_page.get(reverse("card_list")).content.decode()
        assert "were switched off" in text
        assert "The card has expired." in text


def test_what_is_owed_stands_on_the_wallet(owner_page, customer):
    account = customer.wallet
    receivables.take_back(
        account=account, amount_minor=account.posted_minor + 1234, reference="x", kind="refund", description="Out"
    )
    assert "$12.34 are owed" in owner_page.get(reverse("wallet")).content.decode()


def test_a_card_is_kept_when_the_box_is_ticked(owner_page, customer, provider):
    for tick, count in (({}, 0), ({"save_card": "1"}, 1)):
        page = owner_page.post(reverse("top_up"), {"amount": "20"} | tick).url
        provider.pay(page.rsplit("/", 1)[1])
        assert len(customers.saved_cards(customer.organization)) == count


class TestPayingForAQuote:
    @pytest.fixture
    def quote(self, customer):
        """One that the wallet can't cover."""
        made = orders.quote_order(membership=customer.membership, data=customer.form(max_seconds=36_000))
        receivables.take_back(
            account=customer.wallet, amount_minor=customer.wallet.posted_minor, reference="all", kind="refund",
            description="Out",
        )  # fmt: skip
        return made

    def pay(self, page, quote, provider, card=GOOD):
        answer = page.post(reverse("training_pay"), {"quote": quote.pk})
        url = answer.headers["HX-Redirect"]
        provider.pay(url.rsplit("/", 1)[1], card)
        return TopUp.objects.get(quote=quote)

    def test_buys_it_once_the_money_is_there(self, owner_page, quote, provider):
        top_up = self.pay(owner_page, quote, provider)
        assert top_up.amount_minor == max(quote.ceiling_minor, 500)
        back = reverse("training_paid", args=[quote.pk]) + "?paid=1"
        assert "is on its way" in owner_page.get(back).content.decode()
        assert not Order.objects.exists()
        provider.deliver()
        for _ in range(2):
            answer = owner_page.get(back)
            assert answer.url == reverse("job_detail", args=[Order.objects.get().job.pk])
        assert Order.objects.get().quote == quote

    def test_buys_it_though_the_page_was_closed(self, owner_page, quote, provider):
        self.pay(owner_page, quote, provider)
        provider.deliver()
        assert paid.buy_all() == 1
        assert paid.buy_all() == 0
        assert Order.objects.get().quote == quote

    def test_buys_nothing_that_was_not_paid(self, owner_page, quote, provider):
        self.pay(owner_page, quote, provider, DECLINED)
        provider.deliver()
        paid.buy_paid()
        assert not Order.objects.exists()
        text = owner_page.get(reverse("training_paid", args=[quote.pk])).content.decode()
        assert "Nothing was charged" in text

    def test_keeps_the_money_when_the_quote_has_expired(self, owner_page, customer, quote, provider):
        top_up = self.pay(owner_page, quote, provider)
        provider.deliver()
        type(quote).objects.update(expires_at=quote.created_at)
        text = owner_page.get(reverse("training_paid", args=[quote.pk]) + "?paid=1").content.decode()
        assert "Paid, and not bought" in text
        assert customer.wallet.posted_minor == top_up.amount_minor
        assert paid.buy_all() == 0

    def test_is_not_for_others(self, browser, quote, provider):
        stranger = browser(MembershipFactory(role=Role.OWNER))
        assert stranger.get(reverse("training_paid", args=[quote.pk])).status_code == 404

    def test_names_what_is_owed_and_paid_first(self, owner_page, customer, quote):
        receivables.take_back(
            account=customer.wallet, amount_minor=700, reference="out", kind="dispute", description="Taken back"
        )
        type(quote).objects.update(expires_at=quote.created_at)  # so that the card is shown again
        text = owner_page.post(reverse("training_pay"), {"quote": quote.pk}).content.decode()
        assert "Owed, paid first" in text
        assert "$7.00" in text
