"""Top-ups: the row is written before the payment page opens, and only the provider's event credits the wallet."""

from __future__ import annotations

import pytest
import stripe

from billing import gateway, payments
from billing.errors import AmountRefused, PaymentUnavailable
from billing.models import PaymentCustomer, TopUp
from tests.billing.paying import balance, start_top_up
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import TopUpFactory, wallet
from tests.provider import ASKS_FOR_CONFIRMATION, fail_network

pytestmark = pytest.mark.django_db


class TestStartTopUp:
    def test_opens_a_page_for_the_row_and_the_organizations_customer(self, provider):
        first = start_top_up(5000)
        second = payments.start_top_up(account=first.account, amount_minor=500, user=first.created_by)
        page, other = (provider.sandbox.session(each.session_id) for each in (first, second))
        assert (first.state, first.session_id, first.checkout_url) == (TopUp.States.PENDING, page["id"], page["url"])
        assert (page["client_reference_id"], page["amount_total"], page["currency"]) == (str(first.pk), 5000, "usd")
        row = PaymentCustomer.objects.get()
        assert page["customer"] == other["customer"] == row.customer_id
        assert (row.organization, row.mode) == (first.account.organization, "sandbox")
        assert provider.ask("GET", f"customers/{row.customer_id}")["email"] == first.created_by.email
        assert balance(first) == 0

    def test_is_limited_in_its_amount(self, provider):
        for amount in (499, 1_000_001, -(10**30)):
            with pytest.raises(AmountRefused) as caught:
                start_top_up(amount)
            assert str(caught.value.fields["amount_minor"]) == "A top-up must be between $5.00 and $10,000.00."
        assert provider.wire.calls == list(TopUp.objects.all()) == []
        assert [start_top_up(limit).amount_minor for limit in (500, 1_000_000)] == [500, 1_000_000]

    def test_writes_the_row_before_the_call_and_its_id_is_in_the_idempotency_key(self, provider):
        provider.wire.before = lambda _method, path: fail_network() if path.endswith("sessions") else None
        with pytest.raises(PaymentUnavailable):
            start_top_up()
        row = TopUp.objects.get()
        assert row.state == TopUp.States.CREATED  # it has no page, so it cannot be paid
        provider.wire.before = lambda *_call: None
        top_up = payments.start_top_up(account=row.account, amount_minor=5000, user=row.created_by)
        customer = PaymentCustomer.objects.get().customer_id
        # The sandbox stores each idempotency key that it has seen.
        assert provider.sandbox.account.store.get("key", f"top-up-{top_up.pk}-{customer}")

    def test_is_credited_when_its_event_comes_before_the_session_id_is_stored(self, provider):
        def pay_at_once(_method, path):
            if path.endswith("sessions"):
                (session,) = provider.sandbox.account.store.all("checkout.session")
                provider.pay(session["id"])
                provider.deliver()

        provider.wire.after = pay_at_once
        top_up = start_top_up()
        assert top_up.state == TopUp.States.PAID
        assert top_up.session_id.startswith("cs_test_")
        assert balance(top_up) == 5000


@pytest.mark.parametrize(
    ("form_fields", "is_agreed", "credited"),
    [({"card": ASKS_FOR_CONFIRMATION}, False, 0), ({"card": "", "method": "wechat_pay"}, True, 5000)],
    ids=["a card whose bank asks, and the payer refuses", "another payment method"],
)
def test_a_payment_is_credited_after_its_confirmation(provider, form_fields, is_agreed, credited):
    top_up = start_top_up(currency="CNY")
    intent = provider.pay(top_up.session_id, **form_fields).rsplit("/", 1)[1]
    provider.deliver()
    assert balance(top_up) == 0
    provider.sandbox.answer_challenge(intent, is_agreed=is_agreed)
    provider.deliver()
    assert balance(top_up) == credited


def test_returning_from_the_payment_page_credits_nothing(client):
    member = MembershipFactory()
    top_up = TopUpFactory(account=wallet(member.organization))
    client.force_login(member.user)
    assert client.get("/wallet/?paid=1").status_code == 200
    assert (balance(top_up), top_up.state) == (0, TopUp.States.PENDING)


def test_the_api_version_is_that_of_the_installed_client():
    assert stripe._api_version._ApiVersion.CURRENT == gateway.API_VERSION
