"""The API of billing: exact figures, exact names, each organization's own."""

from __future__ import annotations

import pytest

from billing import charges
from billing.models import TopUp
from billing.pricing import Usage
from console.accounts.roles import Role
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import NodeSpecFactory, TopUpFactory, book, quote, wallet
from tests.provider import lost

pytestmark = pytest.mark.django_db

ROUTES = ["wallet/", "wallet/top-ups/", "wallet/holds/", "wallet/receipts/", "node-specs/"]


@pytest.fixture
def account(owner):
    book(hourly="360")
    return wallet(owner.organization, balance_minor=1000)


@pytest.fixture
def page(provider):
    """The provider, behind the gateway."""
    return provider


@pytest.mark.parametrize("route", ROUTES)
def test_nobody_in_particular_is_refused(api, route):
    assert api(None).get(f"/api/v1/{route}").status_code == 401


def test_the_wallet(api, owner, account):
    charges.hold(quote=quote(account, member=owner), reference="order:1")
    assert api(owner).get("/api/v1/wallet/").json() == {
        "currency": "USD",
        "posted_minor": 1000,
        "held_minor": 360,
        "available_minor": 640,
        "credit_minor": 0,
    }


def test_no_wallet_before_the_service_is_active(api, owner):
    for method, route in [("get", "wallet/"), ("get", "wallet/top-ups/")]:
        answer = getattr(api(owner), method)(f"/api/v1/{route}")
        assert answer.status_code == 403
        assert answer.json()["code"] == "service_inactive"
    assert api(owner).post("/api/v1/wallet/top-ups/", {"amount_minor": 5000}).status_code == 403


def test_a_top_up(api, owner, account, page):
    answer = api(owner).post("/api/v1/wallet/top-ups/", {"amount_minor": 5000})
    assert answer.status_code == 201
    top_up = TopUp.objects.get()
    body = answer.json()
    assert (body["id"], body["state"], body["checkout_url"]) == (str(top_up.pk), "pending", top_up.checkout_url)
    assert top_up.checkout_url.startswith("https://pay.example/pay/cs_test_")
    assert (body["amount_minor"], body["currency"], body["paid_at"]) == (5000, "USD", None)
    assert api(owner).get("/api/v1/wallet/top-ups/").json()["results"] == [body]
    assert api(owner).get("/api/v1/wallet/").json()["posted_minor"] == 1000


@pytest.mark.parametrize(
    "amount", [499, 0, -5000, 10**40, -(10**40), "abc", "", None, 500.5, "500.5", True, [], {}, "NaN", 1e300]
)
def test_an_amount_that_is_none(api, owner, account, page, amount):
    answer = api(owner).post("/api/v1/wallet/top-ups/", {"amount_minor": amount})
    assert answer.status_code == 400
    assert answer.json()["code"] == "invalid"
    assert set(answer.json()["fields"]) == {"amount_minor"}
    assert not TopUp.objects.exists()


@pytest.mark.parametrize("body", [[], "text", None, {}])
def test_a_body_that_is_none(api, owner, account, page, body):
    assert api(owner).post("/api/v1/wallet/top-ups/", body).status_code == 400
    assert not TopUp.objects.exists()


def test_a_provider_that_is_away(api, owner, account, provider):
    provider.wire.before = lost
    answer = api(owner).post("/api/v1/wallet/top-ups/", {"amount_minor": 5000})
    assert answer.status_code == 503
    assert "Nothing was charged" in answer.json()["message"]


@pytest.mark.parametrize(
    ("role", "status"), [(Role.OWNER, 201), (Role.BILLING, 201), (Role.MEMBER, 403), (Role.VIEWER, 403)]
)
@pytest.mark.usefixtures("page")
def test_who_may_pay(api, account, role, status):
    someone = MembershipFactory(organization=account.organization, role=role)
    assert api(someone).post("/api/v1/wallet/top-ups/", {"amount_minor": 5000}).status_code == status
    assert api(someone).get("/api/v1/wallet/").status_code == 200


def test_holds_and_receipts(api, owner, account):
    hold = charges.hold(quote=quote(account, member=owner), reference="order:1")
    charges.meter(hold=hold, billable_seconds=50)
    (held,) = api(owner).get("/api/v1/wallet/holds/").json()["results"]
    assert (held["reference"], held["amount_minor"], held["metered_minor"]) == ("order:1", 360, 5)
    charges.settle(
        hold=hold,
        usage=Usage(100, completed=True),
        title="#1 train.py",
        free_lines=[charges.free_line(rule="queue", seconds=2)],
    )
    assert api(owner).get("/api/v1/wallet/holds/").json()["results"] == []
    (receipt,) = api(owner).get("/api/v1/wallet/receipts/").json()["results"]
    assert (receipt["title"], receipt["total_minor"], receipt["ceiling_minor"]) == ("#1 train.py", 10, 360)
    assert [(line["rule"], line["title"], line["amount_minor"]) for line in receipt["lines"]] == [
        ("queue", "Waiting in the queue: free", 0),
        ("time_used", "Node time", 10),
    ]


def test_another_organization_sees_nothing_of_it(api, account, stranger, owner):
    wallet(stranger.organization)
    hold = charges.hold(quote=quote(account, member=owner), reference="order:1")
    TopUpFactory(account=account)
    client = api(stranger)
    assert client.get("/api/v1/wallet/").json()["posted_minor"] == 0
    assert client.get("/api/v1/wallet/holds/").json()["results"] == []
    assert client.get("/api/v1/wallet/top-ups/").json()["results"] == []
    charges.settle(hold=hold, usage=Usage(100, completed=True), title="#1")
    assert client.get("/api/v1/wallet/receipts/").json()["results"] == []


def test_node_specs_with_their_prices(api, owner, account):
    NodeSpecFactory(name="unpriced", position=200, gpus=1, gpu_type="H200")
    small, unpriced = api(owner).get("/api/v1/node-specs/").json()["results"]
    assert (small["name"], small["hourly_minor"], small["currency"]) == ("small", "360.0000", "USD")
    assert (small["cpus"], small["memory_mib"], small["gpus"]) == (1.0, 1024, 0)
    assert (unpriced["name"], unpriced["hourly_minor"], unpriced["gpu_type"]) == ("unpriced", None, "H200")
