"""Whose word is taken: the signature of a webhook. The calls to the provider are tried in test_sandbox.py."""

from __future__ import annotations

import time

import pytest

from billing import gateway
from billing.errors import BadSignature, PaymentUnavailable
from tests.factories.billing import signed

EVENT = {"id": "evt_1", "type": "checkout.session.completed", "object": "event"}


def test_a_signed_event_is_given_as_it_came():
    assert gateway.verify(*signed(EVENT)) == EVENT


@pytest.mark.parametrize("age", [-299, 0, 299])
def test_a_clock_that_is_a_little_off(age):
    assert gateway.verify(*signed(EVENT, at=time.time() - age)) == EVENT


@pytest.mark.parametrize("age", [-100_000, -310, 310, 100_000], ids=["far future", "future", "stale", "very stale"])
def test_stale_and_future_events_are_refused(age):
    with pytest.raises(BadSignature):
        gateway.verify(*signed(EVENT, at=time.time() - age))


def test_another_secret_or_another_body():
    body, header = signed(EVENT)
    with pytest.raises(BadSignature):
        gateway.verify(*signed(EVENT, secret="whsec_another"))
    with pytest.raises(BadSignature):
        gateway.verify(body + b" ", header)


def test_two_secrets_while_one_is_rolled(settings):
    settings.PAYMENTS_SANDBOX = False
    settings.STRIPE_WEBHOOK_SECRETS = ["whsec_old", "whsec_new"]
    for secret in settings.STRIPE_WEBHOOK_SECRETS:
        assert gateway.verify(*signed(EVENT, secret=secret)) == EVENT
    with pytest.raises(BadSignature):
        gateway.verify(*signed(EVENT, secret=gateway.sandbox_secret()))


def test_without_secrets_nothing_is_believed(settings):
    settings.PAYMENTS_SANDBOX = False
    settings.STRIPE_WEBHOOK_SECRETS = []
    with pytest.raises(BadSignature):
        gateway.verify(*signed(EVENT, secret="whsec_any"))


@pytest.mark.parametrize(
    "header",
    [
        "",
        "t=,v1=",
        "garbage",
        "t=1",
        "v1=abc",
        "t=abc,v1=abc",
        "t=1=2,v1=3",
        "t=NaN,v1=abc",
        f"t={'9' * 5000},v1=abc",
        f"t={'9' * 400},v1=abc",
        "t=NOW,v1=\xe9\xff",
        "t=NOW,v1=",
    ],
    ids=range(12),  # some are thousands of characters long
)
def test_garbage_for_a_signature(header):
    with pytest.raises(BadSignature):
        gateway.verify(b"{}", header.replace("NOW", str(int(time.time()))))


def test_a_body_that_is_no_text():
    _, header = signed(EVENT)
    with pytest.raises(BadSignature):
        gateway.verify(b"\xff\xfe", header)


@pytest.mark.parametrize("body", ["[]", "1", "null", "no json", "{}", '{"id": 1, "type": "x"}', '{"id": "evt_1"}'])
def test_a_signed_body_that_is_no_event(body):
    with pytest.raises(BadSignature):
        gateway.verify(*signed(body))


def test_the_sandboxs_secret_is_this_installations_own(settings):
    mine = gateway.sandbox_secret()
    settings.SECRET_KEY = "another installation"
    assert gateway.sandbox_secret() != mine
    assert mine.startswith("whsec_")


@pytest.mark.parametrize(
    ("key", "live"), [("", False), ("sk_test_1", False), ("sk_live_1", True), ("rk_live_1", True), ("rk_test_1", False)]
)
def test_live_keys(settings, key, live):
    settings.STRIPE_SECRET_KEY = key
    assert gateway.is_live() is live


def test_a_provider_that_is_away(settings):
    settings.SANDBOX_URL = "http://127.0.0.1:9"  # the discard port: nobody listens
    with pytest.raises(PaymentUnavailable) as caught:
        gateway.create_customer(reference="1", name="Acme", email="a@example.com")
    assert caught.value.code == "payments_unavailable"
    with pytest.raises(PaymentUnavailable):
        list(gateway.events_since(0))


def test_the_sandbox_is_spoken_to_with_a_secret_of_this_installation(settings):
    key = gateway.sandbox_key()
    assert key.startswith("sk_test_")
    assert key != gateway.sandbox_secret().replace("whsec_", "sk_test_")
    settings.SECRET_KEY = "another installation's"
    assert gateway.sandbox_key() != key
