"""Money that comes in: credited once, and only where everything matches our own row."""

from __future__ import annotations

import pytest
from django.utils import timezone

from billing import gateway, payments
from billing.errors import AmountRefused, PaymentUnavailable
from billing.models import CreditGrant, StripeEvent, TopUp, Transaction
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import TopUpFactory, session_event, wallet
from tests.racing import raised, together

QUARANTINED, APPLIED, IGNORED = (
    StripeEvent.States.QUARANTINED,
    StripeEvent.States.APPLIED,
    StripeEvent.States.IGNORED,
)


def balance(top_up):
    top_up.refresh_from_db()
    top_up.account.refresh_from_db()
    return top_up.account.posted_minor


def apply(event):
    """Store and apply an event; gives its row."""
    stored = payments.receive(event)
    payments.apply_event(event_pk=stored.pk)
    stored.refresh_from_db()
    return stored


@pytest.fixture
def checkout(monkeypatch):
    """The calls to the provider; each makes a page."""
    calls = []

    def create(**fields):
        calls.append(fields)
        return gateway.Checkout(f"cs_{fields['reference']}", f"https://pay.example/{fields['reference']}")

    monkeypatch.setattr(gateway, "create_checkout", create)
    return calls


@pytest.mark.django_db
class TestStartTopUp:
    def start(self, amount_minor):
        member = MembershipFactory()
        account = wallet(member.organization)
        return payments.start_top_up(account=account, amount_minor=amount_minor, user=member.user)

    def test_opens_a_page_for_a_row_that_exists_already(self, checkout):
        top_up = self.start(5000)
        assert (top_up.state, top_up.session_id) == (TopUp.States.PENDING, f"cs_{top_up.pk}")
        assert top_up.checkout_url == f"https://pay.example/{top_up.pk}"
        assert balance(top_up) == 0
        (call,) = checkout
        assert (call["reference"], call["amount_minor"], call["currency"]) == (str(top_up.pk), 5000, "USD")
        assert call["email"] == top_up.created_by.email

    @pytest.mark.parametrize("amount", [500, 1_000_000])
    def test_the_limits_themselves_are_fine(self, checkout, amount):
        assert self.start(amount).amount_minor == amount

    @pytest.mark.parametrize("amount", [499, 1_000_001, 0, -5000, 10**30, -(10**30)])
    def test_beyond_the_limits(self, checkout, amount):
        with pytest.raises(AmountRefused) as caught:
            self.start(amount)
        assert caught.value.code == "invalid"
        assert str(caught.value.fields["amount_minor"]) == "Top up between $5.00 and $10,000.00 at once."
        assert not TopUp.objects.exists()
        assert checkout == []

    def test_a_provider_that_is_away_leaves_a_row_that_nobody_can_pay(self, monkeypatch):
        def away(**_fields):
            raise PaymentUnavailable

        monkeypatch.setattr(gateway, "create_checkout", away)
        with pytest.raises(PaymentUnavailable):
            self.start(5000)
        assert TopUp.objects.get().state == TopUp.States.CREATED

    def test_a_payment_that_is_faster_than_our_own_write(self, monkeypatch):
        """The event comes before the row has learnt the session's id: it is credited, and stays paid."""

        def pay_at_once(**fields):
            top_up = TopUp.objects.get(pk=fields["reference"])
            assert apply(session_event(top_up, id="cs_fast")).state == APPLIED
            return gateway.Checkout("cs_fast", "https://pay.example/fast")

        monkeypatch.setattr(gateway, "create_checkout", pay_at_once)
        top_up = self.start(5000)
        assert (top_up.state, top_up.session_id) == (TopUp.States.PAID, "cs_fast")
        assert balance(top_up) == 5000


@pytest.mark.django_db
class TestApplyEvent:
    def test_a_paid_session_credits_its_top_up(self):
        top_up = TopUpFactory()
        event = session_event(top_up)
        stored = apply(event)
        assert (stored.state, stored.reason) == (APPLIED, "")
        assert stored.applied_at is not None
        assert balance(top_up) == 5000
        assert top_up.state == TopUp.States.PAID
        assert int(top_up.paid_at.timestamp()) == event["created"]
        assert Transaction.objects.filter(reference=f"top-up:{top_up.pk}").count() == 1

    def test_again_and_again(self):
        top_up = TopUpFactory()
        stored = apply(session_event(top_up))
        for _ in range(3):
            payments.apply_event(event_pk=stored.pk)
        assert balance(top_up) == 5000

    def test_other_events_of_the_same_payment_credit_nothing_more(self):
        """Money is keyed on the top-up: events with other ids, of either type, are about the same payment."""
        top_up = TopUpFactory()
        kinds = ["checkout.session.completed", "checkout.session.async_payment_succeeded"]
        for kind in kinds * 2:
            assert apply(session_event(top_up, kind=kind)).state == APPLIED
        assert balance(top_up) == 5000

    def test_a_payment_method_that_takes_days(self):
        top_up = TopUpFactory()
        apply(session_event(top_up, payment_status="unpaid"))
        assert balance(top_up) == 0
        assert top_up.state == TopUp.States.PENDING
        apply(session_event(top_up, kind="checkout.session.async_payment_succeeded"))
        assert balance(top_up) == 5000

    def test_the_same_out_of_order(self):
        top_up = TopUpFactory()
        apply(session_event(top_up, kind="checkout.session.async_payment_succeeded"))
        apply(session_event(top_up, payment_status="unpaid"))
        assert balance(top_up) == 5000
        assert top_up.state == TopUp.States.PAID

    def test_an_expired_page(self):
        top_up = TopUpFactory()
        expired = session_event(top_up, kind="checkout.session.expired", payment_status="unpaid")
        assert apply(expired).state == APPLIED
        assert balance(top_up) == 0
        assert top_up.state == TopUp.States.EXPIRED

    def test_expired_and_paid_out_of_order(self):
        """What was paid is credited, whichever event came first."""
        late, early = TopUpFactory(), TopUpFactory()
        apply(session_event(late, kind="checkout.session.expired", payment_status="unpaid"))
        apply(session_event(late))
        apply(session_event(early))
        apply(session_event(early, kind="checkout.session.expired", payment_status="unpaid"))
        for top_up in (late, early):
            assert balance(top_up) == 5000
            assert top_up.state == TopUp.States.PAID

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"amount_total": 4999}, "amount_total is 4999, not 5000"),
            ({"amount_total": 500_000}, "amount_total is 500000, not 5000"),
            ({"amount_total": None}, "amount_total is None, not 5000"),
            ({"currency": "jpy"}, "currency is 'JPY', not 'USD'"),
            ({"currency": None}, "currency is 'NONE', not 'USD'"),
            ({"livemode": True}, "livemode is True, not False"),
            ({"livemode": None}, "livemode is None, not False"),
            ({"id": "cs_another"}, "session is 'cs_another'"),
            ({"client_reference_id": None}, "No top-up of ours"),
            ({"client_reference_id": "b3a2b1c4-0000-4000-8000-000000000000"}, "No top-up of ours"),
            ({"client_reference_id": "garbage"}, "No top-up of ours"),
            ({"client_reference_id": 10**40}, "No top-up of ours"),
            ({"client_reference_id": ["a"]}, "No top-up of ours"),
            ({"client_reference_id": {"a": 1}}, "No top-up of ours"),
        ],
    )
    def test_what_does_not_match_our_row_is_quarantined(self, change, reason):
        top_up = TopUpFactory()
        stored = apply(session_event(top_up, **change))
        assert stored.state == QUARANTINED
        assert reason in stored.reason
        assert balance(top_up) == 0
        assert top_up.state == TopUp.States.PENDING

    def test_every_mismatch_is_named(self):
        stored = apply(session_event(TopUpFactory(), amount_total=1, currency="eur"))
        assert "amount_total" in stored.reason
        assert "currency" in stored.reason

    @pytest.mark.parametrize("data", [None, [], "x", {}, {"object": None}, {"object": "cs_1"}, {"object": []}])
    def test_an_event_without_a_session(self, data):
        stored = apply({"id": "evt_1", "type": "checkout.session.completed", "data": data})
        assert (stored.state, stored.reason) == (QUARANTINED, "The event carries no Checkout Session.")

    @pytest.mark.parametrize("created", [None, "soon", 10**20, -(10**20), 1e300, [], True])
    def test_a_time_that_cannot_be_read_holds_no_money_up(self, created):
        top_up = TopUpFactory()
        event = session_event(top_up) | {"created": created}
        assert apply(event).state == APPLIED
        assert balance(top_up) == 5000
        assert top_up.paid_at is not None

    def test_an_unknown_type_is_ignored(self):
        top_up = TopUpFactory()
        assert apply(session_event(top_up, kind="payment_intent.succeeded")).state == IGNORED
        assert balance(top_up) == 0

    def test_apply_again_credits_once_the_row_is_right(self):
        top_up = TopUpFactory(session_id="cs_typo")
        stored = apply(session_event(top_up, id="cs_right"))
        assert stored.state == QUARANTINED
        TopUp.objects.filter(pk=top_up.pk).update(session_id="cs_right")
        for _ in range(2):
            payments.apply_event(event_pk=stored.pk)
        stored.refresh_from_db()
        assert (stored.state, stored.reason) == (APPLIED, "")
        assert balance(top_up) == 5000

    def test_a_quarantined_event_of_a_paid_top_up_changes_nothing(self):
        top_up = TopUpFactory()
        apply(session_event(top_up))
        assert apply(session_event(top_up, amount_total=1)).state == QUARANTINED
        assert balance(top_up) == 5000
        assert top_up.state == TopUp.States.PAID


@pytest.mark.django_db(transaction=True)
class TestAtOnce:
    def test_fifty_deliveries_credit_once(self):
        top_up = TopUpFactory()
        event = session_event(top_up)
        outcomes = []
        for _ in range(2):
            outcomes += together(*[lambda: apply(event).state] * 25)
        assert raised(outcomes) == []
        assert balance(top_up) == 5000

    def test_two_events_of_one_payment_credit_once(self):
        for _ in range(5):
            top_up = TopUpFactory()
            events = [session_event(top_up) for _ in range(4)]
            assert raised(together(*(lambda event=event: apply(event) for event in events))) == []
            assert balance(top_up) == 5000

    def test_payments_into_one_wallet_are_all_credited(self):
        account = wallet()
        top_ups = [TopUpFactory(account=account) for _ in range(8)]
        assert raised(together(*(lambda top_up=top_up: apply(session_event(top_up)) for top_up in top_ups))) == []
        assert balance(top_ups[0]) == 8 * 5000


@pytest.mark.django_db
class TestFetchUndelivered:
    def test_stores_what_never_came_and_leaves_the_rest(self, monkeypatch):
        known, lost = session_event(TopUpFactory()), session_event(TopUpFactory())
        apply(known)
        asked = []

        def events_since(created):
            asked.append(created)
            return iter([lost, known])

        monkeypatch.setattr(gateway, "events_since", events_since)
        assert payments.fetch_undelivered() == 1
        assert payments.fetch_undelivered() == 0
        assert StripeEvent.objects.get(event_id=lost["id"]).state == StripeEvent.States.RECEIVED
        assert StripeEvent.objects.get(event_id=known["id"]).state == APPLIED
        assert abs(timezone.now().timestamp() - payments.FETCH_BACK.total_seconds() - asked[0]) < 60


@pytest.mark.django_db
def test_a_grant_moves_its_money_once():
    member = MembershipFactory()
    account = wallet(member.organization)
    credit = CreditGrant(organization=member.organization, amount_minor=700, reason="For the outage")
    for _ in range(2):
        payments.grant(credit=credit, user=member.user, account=account)
    account.refresh_from_db()
    assert account.posted_minor == 700
    assert CreditGrant.objects.get().granted_by == member.user
    assert Transaction.objects.get(reference=f"grant:{credit.pk}").description == "For the outage"


@pytest.mark.django_db
def test_the_page_a_customer_returns_to_credits_nothing(client):
    member = MembershipFactory()
    top_up = TopUpFactory(account=wallet(member.organization))
    client.force_login(member.user)
    assert client.get("/wallet/?paid=1").status_code == 200
    assert balance(top_up) == 0
    assert top_up.state == TopUp.States.PENDING
