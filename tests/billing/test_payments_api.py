"""The API of payments: saved cards without their numbers, automatic top-ups, and top-ups of what a quote lacks."""

from __future__ import annotations

import pytest
from django.utils import timezone

from billing import auto_topup, receivables
from billing.models import AutoTopUp, CreditGrant, StorageBalance, TopUp
from tests.billing.runs import give_credit
from tests.factories.billing import book, quote, wallet
from tests.provider import GOOD

pytestmark = pytest.mark.django_db

MASTERCARD = "5555 5555 5555 4444"


@pytest.fixture
def account(owner):
    """The owner's wallet with 100; a node costs 360 an hour."""
    book()
    return wallet(owner.organization, balance_minor=100)


@pytest.fixture
def client(api, owner):
    """`client(method, path, body)` calls the API as the owner."""
    inner = api(owner)

    def ask(method, path, body=None):
        return getattr(inner, method)(f"/api/v1/{path}", *([] if method == "get" else [body]))

    return ask


@pytest.fixture
def card(client, account, provider):
    """The id of a card that was saved at the provider's page."""
    return save_card(client, provider)


def save_card(client, provider, number=GOOD):
    known = {each["id"] for each in listed_cards(client)}
    page = client("post", "wallet/cards/")
    assert page.status_code == 201
    provider.pay(page.json()["url"].rsplit("/", 1)[1], number)
    (fresh,) = [each["id"] for each in listed_cards(client) if each["id"] not in known]
    return fresh


def listed_cards(client):
    return client("get", "wallet/cards/").json()["results"]


def switch_on(client, card, /, **changes):
    """Set automatic top-ups. A change to `...` leaves a field out."""
    wanted = {"is_on": True, "threshold_minor": 6000, "amount_minor": 2000, "card": card} | changes
    return client("put", "wallet/automatic/", {name: value for name, value in wanted.items() if value is not ...})


class TestCards:
    def test_are_listed_without_their_numbers_the_default_first(self, client, card, provider):
        visa = {"id": card, "brand": "Visa", "last4": "4242", "expires": "12/34", "is_default": True}
        assert listed_cards(client) == [visa]
        other = save_card(client, provider, MASTERCARD)
        # Until a default is chosen, it is the card that the provider lists first, which may be either.
        chosen = next(each["id"] for each in listed_cards(client) if not each["is_default"])
        answer = client("post", f"wallet/cards/{chosen}/default/")
        assert (answer.status_code, answer.json()["results"]) == (200, listed_cards(client))
        (rest,) = {card, other} - {chosen}
        assert [(each["id"], each["is_default"]) for each in listed_cards(client)] == [(chosen, True), (rest, False)]

    def test_switch_off_what_uses_them_when_they_are_removed(self, client, card):
        switch_on(client, card)
        assert client("delete", f"wallet/cards/{card}/").status_code == 204
        assert listed_cards(client) == []
        assert client("get", "wallet/automatic/").json()["is_on"] is False
        assert client("delete", f"wallet/cards/{card}/").status_code == 404


class TestAutomatic:
    def test_is_charged_and_keeps_its_settings_when_it_is_switched_off(self, client, card, provider, account):
        answer = switch_on(client, card)
        assert answer.status_code == 200
        assert answer.json() == client("get", "wallet/automatic/").json() == {
            "is_on": True, "threshold_minor": 6000, "amount_minor": 2000, "card": card,
            "card_label": "Visa •••• 4242", "failures": 0, "last_failure": "", "retry_at": None,
        }  # fmt: skip
        assert auto_topup.run_due() == 1
        provider.deliver()
        account.refresh_from_db()
        assert account.posted_minor == 2100
        AutoTopUp.objects.update(failures=1, last_failure="insufficient_funds", retry_at=timezone.now())
        body = client("put", "wallet/automatic/", {"is_on": False}).json()
        assert (body["is_on"], body["threshold_minor"], body["card"]) == (False, 6000, card)
        assert (body["failures"], body["last_failure"]) == (1, "The card has insufficient funds.")
        assert auto_topup.run_due() == 0

    def test_is_refused_at_the_field(self, client, card):
        assert client("get", "wallet/automatic/").status_code == 204  # it is not set up yet
        assert client("put", "wallet/automatic/", {"is_on": False}).status_code == 204
        wrong = {
            "threshold_minor": (0, 20_001, 10**40, "much", ...),  # at most ten times the amount
            "amount_minor": (499, -2000, ...),
            "card": ("pm_of_somebody", "", ...),
            "is_on": ("perhaps", ...),
        }
        for field, value in ((field, value) for field, values in wrong.items() for value in values):
            answer = switch_on(client, card, **{field: value})
            assert (answer.status_code, answer.json()["code"]) == (400, "invalid")
            assert set(answer.json()["fields"]) == {field}
        assert not AutoTopUp.objects.exists()


class TestPayingForAQuote:
    @pytest.mark.parametrize(
        "case",
        [(7, 0, 7 * 360 - 100), (1, 0, 500), (1, 1000, 1000 + 360)],  # hours, debt, amount to pay; the wallet has 100
        ids=["what the wallet lacks", "at least the smallest payment", "and what is owed, which is paid first"],
    )
    def test_asks_for_what_is_missing_and_what_is_owed(self, client, owner, account, provider, case):
        hours, owed, due = case
        if owed:  # the wallet's 100 are taken first
            receivables.withdraw(
                account=account, amount_minor=owed + 100, reference="out", kind="dispute", description="Taken back"
            )
        offer = quote(account, member=owner, seconds=hours * 3600)
        answer = client("post", f"quotes/{offer.pk}/pay/")
        assert answer.status_code == 201
        top_up = TopUp.objects.get()
        assert (top_up.quote, top_up.amount_minor, top_up.created_by) == (offer, due, owner.user)
        body = answer.json()
        assert (body["id"], body["amount_minor"], body["state"]) == (str(top_up.pk), due, "pending")
        session = provider.ask("GET", f"checkout/sessions/{top_up.session_id}")
        assert session["cancel_url"].endswith(f"/training/paid/{offer.pk}/")
        provider.pay(top_up.session_id)
        provider.deliver()
        account.refresh_from_db()
        assert account.posted_minor == (0 if owed else 100) + due - owed >= offer.ceiling_minor
        assert receivables.owed_minor(account) == 0

    @pytest.mark.usefixtures("provider")
    def test_counts_no_expired_credit_and_adds_unpaid_storage(self, client, owner, account):
        lot = give_credit(account, 200, days=1)
        CreditGrant.objects.filter(pk=lot.pk).update(expires_at=timezone.now())
        StorageBalance.objects.create(account=account, due_minor=30)
        offer = quote(account, member=owner, seconds=7 * 3600)
        assert client("post", f"quotes/{offer.pk}/pay/").status_code == 201
        assert TopUp.objects.get().amount_minor == 7 * 360 - 100 + 30

    @pytest.mark.usefixtures("provider")
    def test_is_refused_if_more_is_missing_than_one_payment_allows(self, client, owner, account, settings):
        offer = quote(account, member=owner, seconds=7 * 3600)  # the wallet lacks $24.20
        settings.TOP_UP_MAXIMUM_MINOR = 2419
        answer = client("post", f"quotes/{offer.pk}/pay/")
        assert (answer.status_code, "$24.20 more" in answer.json()["message"]) == (400, True)
        assert not TopUp.objects.exists()
        settings.TOP_UP_MAXIMUM_MINOR = 2420
        assert client("post", f"quotes/{offer.pk}/pay/").status_code == 201
