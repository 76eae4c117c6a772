"""The API of billing: exact figures, exact names. `tests/console/test_request_matrix.py` tests who may use it."""

from __future__ import annotations

from decimal import Decimal

import pytest

from billing import charges, pricebooks
from billing.models import NodeSpec, PriceBook, TopUp
from billing.pricing import Usage
from tests.factories.billing import NodeSpecFactory, PriceFactory, TopUpFactory, quote, wallet

pytestmark = pytest.mark.django_db


def test_there_is_no_wallet_before_the_service_is_active(api, owner):
    for method, route in (("get", ""), ("get", "top-ups/"), ("post", "top-ups/"), ("post", "cards/")):
        answer = getattr(api(owner), method)(f"/api/v1/wallet/{route}", {"amount_minor": 5000})
        assert (answer.status_code, answer.json()["code"]) == (403, "service_inactive")


@pytest.mark.usefixtures("account")
def test_a_top_up_has_limits_opens_a_page_and_is_listed(api, owner, provider):
    for amount in (499, 10**40, "abc", None, 500.5, True, []):  # the smallest top-up is 500
        refused = api(owner).post("/api/v1/wallet/top-ups/", {"amount_minor": amount})
        assert (refused.status_code, set(refused.json()["fields"])) == (400, {"amount_minor"}), amount
    with provider.network_failing():
        lost = api(owner).post("/api/v1/wallet/top-ups/", {"amount_minor": 5000})
    assert (lost.status_code, "Nothing was charged" in lost.json()["message"]) == (503, True)
    assert (
        not TopUp.objects.exists()
    )  # the failed call creates the customer at the provider, before the row of the top-up
    answer = api(owner).post("/api/v1/wallet/top-ups/", {"amount_minor": 5000})
    assert answer.status_code == 201
    top_up = TopUp.objects.get()
    body = answer.json()
    assert (body["id"], body["state"], body["checkout_url"]) == (str(top_up.pk), "pending", top_up.checkout_url)
    assert top_up.checkout_url.startswith("https://pay.example/pay/cs_test_")
    assert (body["amount_minor"], body["currency"], body["paid_at"]) == (5000, "USD", None)
    assert api(owner).get("/api/v1/wallet/top-ups/").json()["results"] == [body]
    assert api(owner).get("/api/v1/wallet/").json()["posted_minor"] == 10_000


def test_the_wallet_holds_receipts_and_top_ups_are_the_organizations_own(api, owner, account, stranger):
    def results(client, name):
        return client.get(f"/api/v1/wallet/{name}/").json()["results"]

    wallet(stranger.organization)
    ours, theirs = api(owner), api(stranger)
    hold = charges.hold(quote=quote(account, member=owner), reference="order:1")
    assert ours.get("/api/v1/wallet/").json() == {
        "currency": "USD", "posted_minor": 10_000, "held_minor": 360, "available_minor": 9640, "credit_minor": 0,
    }  # fmt: skip
    TopUpFactory(account=account)
    charges.meter(hold=hold, billable_seconds=50)
    (held,) = results(ours, "holds")
    assert (held["reference"], held["amount_minor"], held["metered_minor"]) == ("order:1", 360, 5)
    assert [results(theirs, name) for name in ("holds", "top-ups")] == [[], []]
    queue = charges.free_line(rule="queue", seconds=2)
    charges.settle(hold=hold, usage=Usage(100, completed=True), title="#1 train.py", free_lines=[queue])
    assert results(ours, "holds") == results(theirs, "receipts") == []
    (receipt,) = results(ours, "receipts")
    assert (receipt["title"], receipt["total_minor"], receipt["ceiling_minor"]) == ("#1 train.py", 10, 360)
    assert [(line["rule"], line["title"], line["amount_minor"]) for line in receipt["lines"]] == [
        ("queue", "Waiting in the queue: free", 0),
        ("time_used", "Node time", 10),
    ]


@pytest.mark.usefixtures("account")
def test_node_specs_are_listed_with_their_prices(api, owner):
    """The price of one node, and the discounts; a price of one product is not the general price."""
    draft = pricebooks.copy(book=PriceBook.objects.get())
    small = NodeSpec.objects.get()
    for price in ({"nodes_from": 4, "amount": Decimal(300)}, {"product": "special", "amount": Decimal(1)}):
        PriceFactory(book=draft, node_spec=small, **price)
    pricebooks.publish(book=draft)
    NodeSpecFactory(name="unpriced", position=200, gpus=1, gpu_type="H200")
    NodeSpecFactory(name="withdrawn", is_active=False)
    first, unpriced = api(owner).get("/api/v1/node-specs/").json()["results"]
    assert (first["name"], first["hourly_minor"], first["currency"]) == ("small", "360.0000", "USD")
    assert first["discounts"] == [{"nodes_from": 4, "hourly_minor": "300.0000"}]
    assert (first["cpus"], first["memory_mib"], first["gpus"]) == (1.0, 1024, 0)
    assert (unpriced["name"], unpriced["hourly_minor"], unpriced["gpu_type"]) == ("unpriced", None, "H200")
