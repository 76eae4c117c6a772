"""The sandbox's pages, cards, payments and refunds, spoken to by the gateway's real `stripe` client."""

from __future__ import annotations

import httpx
import pytest
import stripe

from billing import gateway
from billing.errors import PaymentDeclined, PaymentRefused, PaymentUnavailable
from billing.sandbox import checkout as pages
from billing.sandbox import provider
from tests.billing.serving import charge, page, pay, saved_card
from tests.provider import ASKS, ASKS_ALWAYS, DECLINED, DISPUTED, FAILS_LATER, GOOD, POOR, REFUND_FAILS


class TestThePage:
    def test_says_what_is_paid_for(self, customer):
        shown = httpx.get(page(customer).url)
        assert shown.status_code == 200
        assert "$50.00" in shown.text
        assert "Wallet of &lt;Acme &amp; Sons&gt;" in shown.text
        assert "no real money" in shown.text
        assert "default-src 'none'" in shown.headers["Content-Security-Policy"]
        assert "{{" not in shown.text

    def test_a_card_that_pays(self, customer, console):
        made = page(customer)
        answer = pay(made)
        assert (answer.status_code, answer.headers["Location"]) == (303, "http://127.0.0.1:8000/wallet/?paid=1")
        event = console.event("checkout.session.completed")
        session = event["data"]["object"]
        assert event["livemode"] is False
        assert (session["id"], session["payment_status"], session["status"]) == (made.session_id, "paid", "complete")
        assert (session["client_reference_id"], session["amount_total"], session["currency"]) == (
            "top-up-1", 5000, "usd",
        )  # fmt: skip
        intent = gateway.current("payment_intent", session["payment_intent"])
        assert (intent["status"], intent["amount_received"], intent["metadata"]) == (
            "succeeded", 5000, {"top_up": "top-up-1"},
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("card", "sentence"),
        [
            (DECLINED, "Your card was declined."),
            (POOR, "Your card has insufficient funds."),
            ("1234", "test cards only"),
            ("", "test cards only"),
        ],
    )
    def test_a_card_that_does_not(self, customer, served, card, sentence):
        made = page(customer)
        answer = pay(made, card)
        assert answer.status_code == 200
        assert sentence in answer.text
        assert served.session(made.session_id)["payment_status"] == "unpaid"
        assert served.balance("usd") == 0
        assert pay(made).status_code == 303  # another card may be tried
        assert served.balance("usd") == 5000

    @pytest.mark.parametrize("agreed", [True, False])
    def test_a_card_whose_bank_asks(self, customer, served, agreed):
        made = page(customer)
        asked = pay(made, ASKS)
        assert asked.status_code == 303
        challenge = asked.headers["Location"]
        assert "$50.00" in httpx.get(challenge).text
        assert served.balance("usd") == 0
        answer = httpx.post(challenge, data={"answer": "agree" if agreed else "refuse"})
        assert answer.headers["Location"] == ("http://127.0.0.1:8000/wallet/?paid=1" if agreed else made.url)
        assert served.balance("usd") == (5000 if agreed else 0)
        assert ("unable to authenticate" in httpx.get(made.url).text) == (not agreed)
        assert httpx.get(challenge).status_code == 404  # it asks once
        assert httpx.post(challenge, data={"answer": "agree"}).status_code == 404

    @pytest.mark.parametrize(
        ("currency", "offered"), [("CNY", {"Alipay", "WeChat Pay"}), ("USD", {"Alipay"}), ("GBP", set())]
    )
    def test_what_else_can_be_paid_with(self, customer, currency, offered):
        shown = httpx.get(page(customer, currency=currency).url).text
        assert {name for name in ("Alipay", "WeChat Pay") if name in shown} == offered

    def test_another_means_is_confirmed_on_its_own_page(self, customer, served):
        answer = pay(page(customer, currency="CNY"), "", method="alipay")
        assert httpx.post(answer.headers["Location"], data={"answer": "agree"}).status_code == 303
        assert served.balance("cny") == 5000

    def test_paying_twice_pays_once(self, customer, served):
        made = page(customer)
        assert [pay(made).status_code for _ in range(3)] == [303, 303, 303]
        assert served.balance("usd") == 5000

    def test_past_its_time(self, customer, served, console, monkeypatch):
        monkeypatch.setattr(pages, "SESSION_SECONDS", -1)
        answer = pay(page(customer))
        assert "has expired" in answer.text
        assert console.event("checkout.session.expired")
        assert served.balance("usd") == 0

    def test_closed_by_the_console(self, customer, served, console):
        made = page(customer)
        gateway.expire_checkout(made.session_id)
        gateway.expire_checkout(made.session_id)
        assert console.event("checkout.session.expired")
        assert "has expired" in pay(made).text


class TestCards:
    def test_are_saved_when_asked_for(self, customer):
        pay(page(customer, "not saved"))
        assert gateway.cards(customer) == []
        pay(page(customer, "saved", save_card=True))
        (card,) = gateway.cards(customer)
        assert (card.brand, card.last4, card.expires, card.label) == ("Visa", "4242", "12/34", "Visa •••• 4242")

    def test_are_saved_without_a_payment(self, customer, served, console):
        made = gateway.create_card_setup(
            reference="1", customer=customer, currency="USD", return_url="http://127.0.0.1:8000/wallet/cards/"
        )
        assert "Save a card" in httpx.get(made.url).text
        assert "declined" in pay(made, DECLINED).text
        asked = pay(made, ASKS)
        assert httpx.post(asked.headers["Location"], data={"answer": "agree"}).headers["Location"].endswith("?saved=1")
        assert console.event("setup_intent.succeeded")
        assert len(gateway.cards(customer)) == 1
        assert served.balance("usd") == 0

    def test_are_charged_while_the_customer_is_away(self, customer, served):
        made = charge(customer, saved_card(customer))
        assert made.status == "succeeded"
        assert served.balance("usd") == 5700

    def test_a_saved_card_asks_no_more(self, customer):
        made = page(customer, save_card=True)
        httpx.post(pay(made, ASKS).headers["Location"], data={"answer": "agree"})
        assert charge(customer, gateway.cards(customer)[0].method_id).status == "succeeded"

    @pytest.mark.parametrize(
        ("card", "code"), [(FAILS_LATER, "generic_decline"), (ASKS_ALWAYS, "authentication_required")]
    )
    def test_that_fail_while_the_customer_is_away(self, customer, served, card, code):
        made = gateway.create_card_setup(reference="1", customer=customer, currency="USD", return_url="http://x/")
        where = pay(made, card).headers["Location"]
        if "challenge" in where:
            httpx.post(where, data={"answer": "agree"})
        method = gateway.cards(customer)[0].method_id
        for _ in range(2):  # and again by the same key: the same answer
            with pytest.raises(PaymentDeclined) as caught:
                charge(customer, method)
            assert caught.value.reason == code
        assert served.balance("usd") == 0

    def test_that_were_removed_are_charged_no_more(self, customer, served):
        method = saved_card(customer)
        for _ in range(2):
            gateway.remove_card(method)
        assert gateway.cards(customer) == []
        with pytest.raises(PaymentRefused):
            charge(customer, method)
        assert served.balance("usd") == 5000

    def test_of_another_customer(self, customer):
        other = gateway.create_customer(reference="2", name="Other", email="b@example.com")
        with pytest.raises(PaymentRefused):
            charge(other, saved_card(customer))


class TestWhatGoesBack:
    def paid(self, customer, card=GOOD):
        made = page(customer)
        pay(made, card)
        return gateway.current("checkout.session", made.session_id)["payment_intent"]

    def test_refunds(self, customer, served, console):
        intent = self.paid(customer)
        made = gateway.refund(reference="r1", payment_intent=intent, amount_minor=2000)
        assert made.status == "succeeded"
        assert gateway.refund(reference="r1", payment_intent=intent, amount_minor=2000) == made
        assert served.balance("usd") == 3000
        assert gateway.refund_with(reference="r1", payment_intent=intent) == made
        assert gateway.refund_with(reference="r2", payment_intent=intent) is None
        assert console.event("refund.created")["data"]["object"]["metadata"] == {"refund": "r1"}
        with pytest.raises(PaymentRefused):
            gateway.refund(reference="r2", payment_intent=intent, amount_minor=3001)
        gateway.refund(reference="r3", payment_intent=intent, amount_minor=3000)
        with pytest.raises(PaymentRefused, match="refused"):
            gateway.refund(reference="r4", payment_intent=intent, amount_minor=1)
        assert served.balance("usd") == 0

    def test_a_refund_that_fails_later(self, customer, served, console):
        made = gateway.refund(reference="r1", payment_intent=self.paid(customer, REFUND_FAILS), amount_minor=5000)
        assert made.status == "succeeded"
        assert console.event("refund.failed")
        assert gateway.current("refund", made.id)["status"] == "failed"
        assert served.balance("usd") == 5000

    @pytest.mark.parametrize(("status", "left"), [("won", 5000), ("lost", 0)])
    def test_a_dispute(self, customer, served, console, status, left):
        evidence = "winning_evidence" if left else "losing_evidence"
        intent = self.paid(customer, DISPUTED)
        dispute = console.event("charge.dispute.created")["data"]["object"]
        assert (dispute["payment_intent"], dispute["amount"], dispute["status"]) == (intent, 5000, "needs_response")
        assert served.balance("usd") == 0
        with pytest.raises(PaymentRefused):
            gateway.refund(reference="r1", payment_intent=intent, amount_minor=1)
        client = gateway._client()
        client.v1.disputes.update(dispute["id"], {"evidence": {"uncategorized_text": evidence}})
        ended = gateway.current("dispute", dispute["id"])
        assert ended["status"] == status
        assert [each["amount"] for each in ended["balance_transactions"]] == [-5000, 5000][: 2 if left else 1]
        assert served.balance("usd") == left
        with pytest.raises(stripe.InvalidRequestError):
            client.v1.disputes.close(dispute["id"])


class TestIdempotency:
    def test_one_key_gives_one_answer(self, customer, served):
        first = page(customer)
        assert page(customer) == first
        assert page(customer, "top-up-2").session_id != first.session_id
        assert len(list(served.book.store.all("checkout.session"))) == 2

    def test_the_answer_is_the_first_one_whatever_happened_since(self, customer):
        made = page(customer)
        pay(made)
        assert page(customer) == made

    def test_the_same_key_for_something_else_is_refused(self, customer, served):
        page(customer)
        with pytest.raises(PaymentUnavailable) as caught:
            page(customer, amount_minor=6000)
        assert isinstance(caught.value.__cause__, stripe.IdempotencyError)
        assert "same parameters" in str(caught.value.__cause__)

    def test_what_was_refused_as_invalid_is_not_kept(self, customer):
        options = {"idempotency_key": "k"}
        client = gateway._client()
        with pytest.raises(stripe.InvalidRequestError):
            client.v1.refunds.create({"payment_intent": "pi_none"}, options)
        assert client.v1.customers.create({"name": "B"}, options).id

    def test_a_key_is_forgotten_after_a_day(self, customer, served):
        first = page(customer)
        now = served.book.clock()
        served.book.clock = lambda: now + provider.KEY_SECONDS + 1
        assert page(customer).session_id != first.session_id


class TestIntents:
    """What the gateway does not use, and others of our tests lean on."""

    def make(self, customer, **changes):
        fields = {"amount": 900, "currency": "usd", "customer": customer, "payment_method": "pm_card_visa"}
        return gateway._client().v1.payment_intents.create(fields | changes)

    def test_captured_by_hand(self, customer, served):
        v1 = gateway._client().v1
        made = self.make(customer, capture_method="manual", confirm=True)
        assert (made.status, made.amount_capturable, served.balance("usd")) == ("requires_capture", 900, 0)
        with pytest.raises(stripe.InvalidRequestError):
            v1.payment_intents.capture(made.id, {"amount_to_capture": 901})
        taken = v1.payment_intents.capture(made.id, {"amount_to_capture": 600})
        assert (taken.status, taken.amount_received, served.balance("usd")) == ("succeeded", 600, 600)
        with pytest.raises(stripe.InvalidRequestError):
            v1.payment_intents.capture(made.id)

    def test_given_up(self, customer, served):
        v1 = gateway._client().v1
        made = self.make(customer, capture_method="manual", confirm=True)
        assert v1.payment_intents.cancel(made.id).status == "canceled"
        with pytest.raises(stripe.InvalidRequestError):
            v1.payment_intents.capture(made.id)
        assert served.balance("usd") == 0
