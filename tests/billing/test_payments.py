"""Money that comes in: a row before its page, a page for the right amount, and nothing credited by coming back."""

from __future__ import annotations

import pytest
import stripe

from billing import gateway, payments
from billing.errors import AmountRefused, PaymentUnavailable
from billing.models import Account, PaymentCustomer, Quote, StripeEvent, TopUp
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import TopUpFactory, book, quote, wallet
from tests.provider import ASKS, DECLINED, GOOD, POOR, lost


def balance(top_up):
    top_up.refresh_from_db()
    top_up.account.refresh_from_db()
    return top_up.account.posted_minor


def start(amount_minor=5000, **options):
    member = MembershipFactory()
    account = wallet(member.organization)
    return payments.start_top_up(account=account, amount_minor=amount_minor, user=member.user, **options)


def page_of(provider, top_up):
    return provider.provider.session(top_up.session_id)


@pytest.mark.django_db
class TestStartTopUp:
    def test_opens_a_page_for_the_row(self, provider):
        top_up = start(5000)
        page = page_of(provider, top_up)
        assert (top_up.state, top_up.session_id, top_up.checkout_url) == (TopUp.States.PENDING, page["id"], page["url"])
        assert (page["client_reference_id"], page["amount_total"], page["currency"]) == (str(top_up.pk), 5000, "usd")
        assert balance(top_up) == 0

    def test_the_customer_at_the_provider_is_the_organization(self, provider):
        member = MembershipFactory()
        account = wallet(member.organization)
        pages = [
            page_of(provider, payments.start_top_up(account=account, amount_minor=500, user=member.user))
            for _ in range(2)
        ]
        row = PaymentCustomer.objects.get()
        assert {page["customer"] for page in pages} == {row.customer_id}
        assert (row.organization, row.mode) == (member.organization, "sandbox")
        assert provider.ask("GET", f"customers/{row.customer_id}")["email"] == member.user.email

    @pytest.mark.parametrize("amount", [500, 1_000_000])
    def test_the_limits_themselves_are_fine(self, provider, amount):
        assert start(amount).amount_minor == amount

    @pytest.mark.parametrize("amount", [499, 1_000_001, 0, -5000, 10**30, -(10**30)])
    def test_beyond_the_limits(self, provider, amount):
        with pytest.raises(AmountRefused) as caught:
            start(amount)
        assert caught.value.code == "invalid"
        assert str(caught.value.fields["amount_minor"]) == "Top up between $5.00 and $10,000.00 at once."
        assert not TopUp.objects.exists()
        assert provider.wire.calls == []

    def test_the_row_is_written_before_the_call_and_its_id_is_the_key(self, provider):
        seen = []
        provider.wire.before = lambda _method, path: path.endswith("sessions") and seen.append(TopUp.objects.get().pk)
        top_up = start()
        assert seen == [top_up.pk]
        customer = PaymentCustomer.objects.get().customer_id
        assert provider.provider.book.store.get("key", f"top-up-{top_up.pk}-{customer}")

    def test_a_provider_that_is_away_leaves_a_row_that_nobody_can_pay(self, provider):
        provider.wire.before = lambda _method, path: lost() if path.endswith("sessions") else None
        with pytest.raises(PaymentUnavailable):
            start(5000)
        assert TopUp.objects.get().state == TopUp.States.CREATED

    def test_a_payment_that_is_faster_than_our_own_write(self, provider):
        """The event comes before the row has learnt the session's id: it is credited, and stays paid."""

        def pay_at_once(_method, path):
            if path.endswith("sessions"):
                (session,) = provider.provider.book.store.all("checkout.session")
                provider.pay(session["id"])
                provider.deliver()

        provider.wire.after = pay_at_once
        top_up = start(5000)
        assert top_up.state == TopUp.States.PAID
        assert top_up.session_id.startswith("cs_test_")
        assert balance(top_up) == 5000

    def test_a_card_is_saved_only_when_asked_for(self, provider):
        for save in (False, True):
            top_up = start(5000, save_card=save)
            provider.pay(top_up.session_id)
            provider.deliver()
            assert balance(top_up) == 5000
            (row,) = PaymentCustomer.objects.filter(organization=top_up.account.organization)
            assert len(gateway.cards(row.customer_id)) == int(save)


@pytest.mark.django_db
class TestPaying:
    @pytest.mark.parametrize(("card", "sentence"), [(DECLINED, "declined"), (POOR, "insufficient funds")])
    def test_a_declined_card_pays_nothing_and_another_may_be_tried(self, provider, card, sentence):
        top_up = start()
        assert sentence in provider.pay(top_up.session_id, card)
        provider.deliver()
        assert (balance(top_up), top_up.state) == (0, TopUp.States.PENDING)
        provider.pay(top_up.session_id, GOOD)
        provider.deliver()
        assert (balance(top_up), top_up.state) == (5000, TopUp.States.PAID)

    @pytest.mark.parametrize("agreed", [True, False])
    def test_a_card_whose_bank_asks(self, provider, agreed):
        top_up = start()
        intent = provider.pay(top_up.session_id, ASKS).rsplit("/", 1)[1]
        provider.deliver()
        assert balance(top_up) == 0
        provider.provider.answer_challenge(intent, agreed=agreed)
        provider.deliver()
        assert balance(top_up) == (5000 if agreed else 0)

    def test_other_means_in_their_currency(self, provider):
        member = MembershipFactory()
        account = wallet(member.organization, currency="CNY")
        top_up = payments.start_top_up(account=account, amount_minor=5000, user=member.user)
        where = provider.pay(top_up.session_id, "", method="wechat_pay")
        provider.provider.answer_challenge(where.rsplit("/", 1)[1], agreed=True)
        provider.deliver()
        assert balance(top_up) == 5000

    def test_every_payment_is_on_both_sides(self, provider):
        for _ in range(3):
            provider.pay(start(5000).session_id)
        provider.deliver()
        assert provider.held() == 15000
        assert StripeEvent.objects.filter(state=StripeEvent.States.QUARANTINED).count() == 0


@pytest.mark.django_db
class TestPayFor:
    def offer(self, balance_minor):
        book()
        member = MembershipFactory()
        account = wallet(member.organization, balance_minor=balance_minor)
        return payments.pay_for(
            quote=quote(account, seconds=36_000), account=account, user=member.user, return_path="/training/paid/x/"
        )

    def test_what_the_wallet_lacks(self, provider):
        top_up = self.offer(1000)
        assert top_up.quote.ceiling_minor == 3600
        assert top_up.amount_minor == 2600
        assert page_of(provider, top_up)["success_url"].endswith("/training/paid/x/?paid=1")

    def test_at_least_the_smallest_payment(self, provider):
        assert self.offer(3500).amount_minor == 500

    def test_no_more_than_one_payment_may_be(self, provider, settings):
        settings.TOP_UP_MAXIMUM_MINOR = 2599
        with pytest.raises(AmountRefused) as caught:
            self.offer(1000)
        assert "$26.00 more" in str(caught.value.message)
        assert "$25.99 at most" in str(caught.value.message)
        assert not TopUp.objects.exists()
        settings.TOP_UP_MAXIMUM_MINOR = 2600
        offer = Quote.objects.get()
        account = Account.objects.get(organization=offer.organization)
        paid = payments.pay_for(quote=offer, account=account, user=offer.created_by, return_path="/")
        assert paid.amount_minor == 2600


@pytest.mark.django_db
def test_the_page_a_customer_returns_to_credits_nothing(client):
    member = MembershipFactory()
    top_up = TopUpFactory(account=wallet(member.organization))
    client.force_login(member.user)
    assert client.get("/wallet/?paid=1").status_code == 200
    assert balance(top_up) == 0
    assert top_up.state == TopUp.States.PENDING


def test_the_version_is_the_one_the_client_was_made_for():
    assert stripe._api_version._ApiVersion.CURRENT == gateway.API_VERSION
