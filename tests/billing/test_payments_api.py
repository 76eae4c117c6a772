"""The API of paying: cards are named and never typed, automatic top-ups are set whole, quotes are paid for once."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from billing import automatic, receivables
from billing.models import AutoTopUp, Quote, TopUp
from tests.factories.billing import book, quote, wallet
from tests.provider import GOOD, lost

pytestmark = pytest.mark.django_db

MASTERCARD = "5555 5555 5555 4444"


@pytest.fixture
def account(owner):
    book(hourly="360")
    return wallet(owner.organization, balance_minor=100)


@pytest.fixture
def client(api, owner):
    """As `api(owner)`, by what comes after the version."""
    made = api(owner)

    def ask(method, path, body=None):
        return getattr(made, method)(f"/api/v1/{path}", *([] if method == "get" else [body]))

    return ask


@pytest.fixture
def card(client, account, provider):
    """The id of a card that was saved at the provider's page."""
    return save(client, provider)


def save(client, provider, number=GOOD):
    known = {each["id"] for each in listed(client)}
    page = client("post", "wallet/cards/")
    assert page.status_code == 201
    provider.pay(page.json()["url"].rsplit("/", 1)[1], number)
    (fresh,) = [each["id"] for each in listed(client) if each["id"] not in known]
    return fresh


def listed(client):
    return client("get", "wallet/cards/").json()["results"]


def switch_on(client, its_card, **changes):
    wanted = {"is_on": True, "threshold_minor": 6000, "amount_minor": 2000, "card": its_card} | changes
    return client("put", "wallet/automatic/", {name: value for name, value in wanted.items() if value is not ...})


class TestCards:
    def test_are_listed_without_their_numbers(self, client, card):
        assert listed(client) == [
            {"id": card, "brand": "Visa", "last4": "4242", "expires": "12/34", "is_default": True},
        ]

    def test_none_is_asked_for_before_the_first(self, client, account, provider):
        assert listed(client) == []
        assert provider.wire.calls == []

    def test_another_is_made_the_default(self, client, card, provider):
        other = save(client, provider, MASTERCARD)
        second = next(each["id"] for each in listed(client) if not each["is_default"])
        answer = client("post", f"wallet/cards/{second}/default/")
        assert answer.status_code == 200
        assert answer.json()["results"] == listed(client)
        assert [(each["id"], each["is_default"]) for each in listed(client)] == [
            (second, True),
            (({card, other} - {second}).pop(), False),
        ]

    def test_one_is_removed_with_what_uses_it(self, client, card):
        switch_on(client, card)
        assert client("delete", f"wallet/cards/{card}/").status_code == 204
        assert listed(client) == []
        assert client("get", "wallet/automatic/").json()["is_on"] is False
        assert client("delete", f"wallet/cards/{card}/").status_code == 404

    def test_of_another_organization_are_not_there(self, api, client, card, stranger):
        wallet(stranger.organization)
        theirs = api(stranger)
        assert theirs.get("/api/v1/wallet/cards/").json() == {"results": []}
        assert theirs.delete(f"/api/v1/wallet/cards/{card}/").status_code == 404
        assert theirs.post(f"/api/v1/wallet/cards/{card}/default/").status_code == 404
        assert [each["id"] for each in listed(client)] == [card]

    @pytest.mark.parametrize(("method", "path"), [("get", "wallet/cards/"), ("post", "wallet/cards/")])
    def test_of_a_provider_that_is_away(self, client, card, provider, method, path):
        provider.wire.before = lost
        answer = client(method, path)
        assert (answer.status_code, answer.json()["code"]) == (503, "payments_unavailable")

    def test_before_there_is_a_wallet(self, client, owner):
        assert client("post", "wallet/cards/").json()["code"] == "service_inactive"

    def test_a_top_up_can_save_one(self, client, account, provider):
        answer = client("post", "wallet/top-ups/", {"amount_minor": 5000, "save_card": True})
        provider.pay(answer.json()["checkout_url"].rsplit("/", 1)[1])
        assert [each["last4"] for each in listed(client)] == ["4242"]


class TestAutomatic:
    def test_was_never_set(self, client, account):
        assert client("get", "wallet/automatic/").status_code == 204
        assert client("put", "wallet/automatic/", {"is_on": False}).status_code == 204
        assert not AutoTopUp.objects.exists()

    def test_is_set_read_and_charged(self, client, card, provider, account):
        answer = switch_on(client, card)
        assert answer.status_code == 200
        assert answer.json() == client("get", "wallet/automatic/").json() == {
            "is_on": True, "threshold_minor": 6000, "amount_minor": 2000, "card": card,
            "card_label": "Visa •••• 4242", "failures": 0, "last_failure": "", "retry_at": None,
        }  # fmt: skip
        assert automatic.sweep() == 1
        provider.deliver()
        account.refresh_from_db()
        assert account.posted_minor == 2100

    def test_is_switched_off_and_keeps_what_was_set(self, client, card):
        switch_on(client, card)
        told = client("put", "wallet/automatic/", {"is_on": False}).json()
        assert (told["is_on"], told["threshold_minor"], told["card"]) == (False, 6000, card)
        assert automatic.sweep() == 0

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"threshold_minor": 0}, "threshold_minor"),
            ({"threshold_minor": 20_001}, "threshold_minor"),
            ({"threshold_minor": 10**40}, "threshold_minor"),
            ({"threshold_minor": "much"}, "threshold_minor"),
            ({"threshold_minor": ...}, "threshold_minor"),
            ({"amount_minor": 499}, "amount_minor"),
            ({"amount_minor": -2000}, "amount_minor"),
            ({"amount_minor": ...}, "amount_minor"),
            ({"card": "pm_of_somebody"}, "card"),
            ({"card": ""}, "card"),
            ({"card": ...}, "card"),
            ({"is_on": ...}, "is_on"),
            ({"is_on": "perhaps"}, "is_on"),
        ],
    )
    def test_what_makes_no_sense_changes_nothing(self, client, card, changes, field):
        answer = switch_on(client, card, **changes)
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid")
        assert set(answer.json()["fields"]) == {field}
        assert not AutoTopUp.objects.exists()

    def test_says_why_a_payment_failed(self, client, card):
        switch_on(client, card)
        AutoTopUp.objects.update(failures=1, last_failure="insufficient_funds", retry_at=timezone.now())
        told = client("get", "wallet/automatic/").json()
        assert (told["failures"], told["last_failure"]) == (1, "The card has insufficient funds.")
        assert told["retry_at"] is not None


class TestAQuoteThatIsPaidFor:
    def test_asks_for_what_the_wallet_lacks(self, client, owner, account, provider):
        offer = quote(account, member=owner, seconds=7 * 3600)
        answer = client("post", f"quotes/{offer.pk}/pay/")
        assert answer.status_code == 201
        top_up = TopUp.objects.get()
        assert (top_up.quote, top_up.amount_minor, top_up.created_by) == (offer, 7 * 360 - 100, owner.user)
        body = answer.json()
        assert (body["id"], body["amount_minor"], body["state"]) == (str(top_up.pk), 7 * 360 - 100, "pending")
        session = provider.ask("GET", f"checkout/sessions/{top_up.session_id}")
        assert session["cancel_url"].endswith(f"/training/paid/{offer.pk}/")
        provider.pay(top_up.session_id)
        provider.deliver()
        account.refresh_from_db()
        assert account.posted_minor == offer.ceiling_minor

    def test_asks_for_no_less_than_one_payments_least(self, client, owner, account, provider):
        offer = quote(account, member=owner)
        assert client("post", f"quotes/{offer.pk}/pay/").json()["amount_minor"] == 500

    def test_asks_for_what_is_owed_too_as_that_is_paid_first(self, client, owner, account, provider):
        take = {"reference": "out", "kind": "dispute", "description": "Taken back"}
        receivables.take_back(account=account, amount_minor=1100, **take)
        offer = quote(account, member=owner)
        assert client("post", f"quotes/{offer.pk}/pay/").json()["amount_minor"] == 1000 + 360
        provider.pay(TopUp.objects.get().session_id)
        provider.deliver()
        account.refresh_from_db()
        assert (account.posted_minor, receivables.owed_minor(account)) == (offer.ceiling_minor, 0)

    def test_has_expired(self, client, owner, account, provider):
        offer = quote(account, member=owner)
        Quote.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
        answer = client("post", f"quotes/{offer.pk}/pay/")
        assert (answer.status_code, answer.json()["code"]) == (409, "quote_expired")
        assert not TopUp.objects.exists()

    def test_is_of_another_organization(self, api, owner, account, provider, stranger):
        wallet(stranger.organization)
        offer = quote(account, member=owner)
        assert api(stranger).post(f"/api/v1/quotes/{offer.pk}/pay/").status_code == 404
        assert not TopUp.objects.exists()
