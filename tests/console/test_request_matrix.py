"""Every route under /api/v1/, with every method, as nobody, as another organization, and as each role.

A route that isn't in `ROUTES` fails here: whoever adds one says who may use it.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.db import transaction
from django.urls import URLPattern, URLResolver, get_resolver

from billing import charges, documents
from billing.credit import grant
from billing.ledger import wallet_account
from billing.models import CreditGrant, Voucher
from billing.pricing import Usage
from console.accounts.models import ApiToken, Membership
from console.accounts.roles import Capability, Role, allows
from jobs import activation, catalogue
from tests.factories.accounts import MembershipFactory, UserFactory
from tests.factories.billing import quote
from tests.provider import Stripe

pytestmark = pytest.mark.django_db
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
VIEW, STORE, RUN, PAY, MANAGE = (
    Capability.VIEW, Capability.STORE, Capability.RUN, Capability.PAY, Capability.MANAGE,
)  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """What a method needs, what a member who may gets, and what another organization's owner gets."""

    capability: Capability
    status: int = 200
    foreign: int = 404
    body: Any = None
    own: bool = False
    """The object is the owner's own: nobody else of the organization sees it either."""
    also: Capability = Capability.VIEW
    """What else it takes."""


@dataclass(frozen=True)
class Raw:
    """A body that is no JSON."""

    content: bytes = field(repr=False)


def archive() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("train.csv", "1,2\n")
    return packed.getvalue()


def listing(capability: Capability = VIEW) -> Ask:
    """A list is there for every organization: its own."""
    return Ask(capability, foreign=200)


PUBLIC: dict[str, Ask] = {}
QUOTE = {
    "product": "metered", "framework": "pytorch", "image": "pytorch", "workspace": "matrix", "code_path": "train.py",
    "arguments": [], "datasets": ["digits"], "epochs": 1, "lr": 0.1, "batch_size": 8, "node_spec": "nano", "nodes": 1,
    "workers_per_node": 1,
}  # fmt: skip
ROUTES: dict[str, dict[str, Ask]] = {
    "schema/": PUBLIC,
    "docs/": PUBLIC,
    "whoami/": {"GET": listing()},
    "tokens/": {"GET": listing(), "POST": Ask(VIEW, 201, 201, {"name": "another"})},
    "tokens/<int:pk>/": {"DELETE": Ask(VIEW, 204, own=True)},
    "organization/": {"GET": listing(), "PATCH": Ask(MANAGE, 200, 200, {"name": "Renamed"})},
    "organization/members/": {
        "GET": listing(),
        "POST": Ask(MANAGE, 201, 201, {"email": "homeless@example.com", "role": "viewer"}),
    },
    "organization/members/<int:pk>/": {
        "PATCH": Ask(MANAGE, 200, body={"role": "billing"}),
        "DELETE": Ask(MANAGE, 204),
    },
    "images/": {"GET": listing()},
    "datasets/": {"GET": listing(), "POST": Ask(STORE, 201, 201, {"name": "fresh"})},
    "datasets/<str:name>/": {"GET": Ask(VIEW), "DELETE": Ask(STORE, 204)},
    "datasets/<str:name>/archive/": {"PUT": Ask(STORE, 201, body=Raw(archive()))},
    "workspaces/": {"GET": listing(), "POST": Ask(STORE, 201, 201, {"name": "fresh"})},
    "workspaces/<str:name>/": {"GET": Ask(VIEW), "DELETE": Ask(STORE, 204)},
    "workspaces/<str:name>/files/": {"GET": Ask(VIEW)},
    "workspaces/<str:name>/files/<file:path>": {
        "GET": Ask(VIEW),
        "PUT": Ask(STORE, 200, body=Raw(b"print(2)")),
        "DELETE": Ask(STORE, 204),
    },
    "wallet/": {"GET": listing()},
    "wallet/top-ups/": {"GET": listing(PAY), "POST": Ask(PAY, 201, 201, {"amount_minor": 500})},
    "wallet/cards/": {"GET": listing(PAY), "POST": Ask(PAY, 201, 201)},
    "wallet/cards/<str:card>/": {"DELETE": Ask(PAY, 204)},
    "wallet/cards/<str:card>/default/": {"POST": Ask(PAY)},
    "wallet/automatic/": {
        # the other organization never set one up, and can't use our card
        "GET": Ask(PAY, 200, 204),
        "PUT": Ask(PAY, 200, 400, {"is_on": True, "threshold_minor": 900, "amount_minor": 900, "card": "<card>"}),
    },
    "wallet/holds/": {"GET": listing()},
    "wallet/receipts/": {"GET": listing()},
    "node-specs/": {"GET": listing()},
    "costs/": {"GET": listing()},
    "costs/csv/": {"GET": listing()},
    "budgets/": {"GET": listing(), "PUT": Ask(PAY, 200, 200, {"amount_minor": 10**6})},
    "credits/": {"GET": listing()},
    "vouchers/redeem/": {"POST": Ask(PAY, 201, 201, {"code": "MATRIX25"})},
    "invoices/": {"GET": listing(PAY), "POST": Ask(PAY, 201, 204)},
    "invoices/<int:pk>/": {"GET": Ask(PAY)},
    # without Pango there is no PDF, and the answer says so
    "invoices/<int:pk>/pdf/": {"GET": Ask(PAY, 200 if documents.is_available() else 503)},
    "invoices/<int:pk>/csv/": {"GET": Ask(PAY)},
    "products/": {"GET": listing()},
    "services/distributed-training/activate/": {"POST": Ask(MANAGE, 200, 200, {"accept_terms": True})},
    "services/distributed-training/deactivate/": {"POST": Ask(MANAGE, 204, 204)},
    "quotes/": {"POST": Ask(RUN, 201, 400, QUOTE)},
    "quotes/<uuid:quote_id>/": {"GET": Ask(VIEW)},
    "quotes/<uuid:quote_id>/pay/": {"POST": Ask(PAY, 201, also=RUN)},
    "orders/": {"POST": Ask(RUN, 201, 404, {"quote": "<quote>"})},
    "probes/": {"POST": Ask(RUN, 201, 400, QUOTE)},
    "jobs/": {"GET": listing()},
    "jobs/<int:pk>/": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/cancel/": {"POST": Ask(RUN)},
    "jobs/<int:pk>/rerun/": {"POST": Ask(RUN, 201)},
    "jobs/<int:pk>/logs/": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/stream/": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/metrics/": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/telemetry/": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/stacks/": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/check/": {"GET": Ask(VIEW)},
    "images/<str:name>/check/": {"POST": Ask(RUN, 201, 201, {"node_spec": "nano", "nodes": 1})},
    "jobs/<int:pk>/events/": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/environment/": {"GET": Ask(VIEW)},
    # the job has not ended: there is no receipt yet
    "jobs/<int:pk>/receipt/": {"GET": Ask(VIEW, 404)},
}


def routes_of(resolver: URLResolver) -> list[str]:
    found = []
    for entry in resolver.url_patterns:
        inner = [str(entry.pattern)] if isinstance(entry, URLPattern) else routes_of(entry)
        found += inner if isinstance(entry, URLPattern) else [f"{entry.pattern}{route}" for route in inner]
    return found


def test_every_route_is_in_the_table():
    served = {route.removeprefix("api/v1/") for route in routes_of(get_resolver()) if route.startswith("api/v1/")}
    assert served == set(ROUTES)


OPERATIONS: dict[str, dict[str, int]] = {
    "healthz": {"nobody": 200, "customer": 200, "staff": 200, "operator": 200},
    "readyz": {"nobody": 200, "customer": 200, "staff": 200, "operator": 200},
    "metrics": {"nobody": 404, "customer": 404, "staff": 404, "operator": 200},
}
"""Addresses of operators, outside the API: the staff has a session, the operator METRICS_TOKEN."""


@pytest.mark.parametrize("route", OPERATIONS)
def test_operators_addresses(client, owner, settings, route):
    settings.METRICS_TOKEN = "of-the-operator"
    asked = {"nobody": client.get(f"/{route}")}
    client.force_login(owner.user)
    asked["customer"] = client.get(f"/{route}")
    client.force_login(UserFactory(is_staff=True, is_superuser=True))
    asked["staff"] = client.get(f"/{route}")
    client.logout()
    asked["operator"] = client.get(f"/{route}", headers={"Authorization": "Bearer of-the-operator"})
    assert {who: answer.status_code for who, answer in asked.items()} == OPERATIONS[route]
    assert {method: client.generic(method, f"/{route}").status_code for method in METHODS[1:]} == dict.fromkeys(
        METHODS[1:], 405
    )


class World:
    """Two customers; the first has one of everything, and one member of each role."""

    def __init__(self, api, owner: Membership, stranger: Membership, provider: Stripe) -> None:
        self.api, self.owner, self.provider = api, owner, provider
        catalogue.seed()
        for membership in (owner, stranger):
            activation.activate(membership=membership, accept_terms=True)
            wallet = wallet_account(organization_id=membership.organization_id, currency="USD")
            credit = CreditGrant(organization=membership.organization, amount_minor=10_000, reason="test")
            grant(credit=credit, user=membership.user, account=wallet)
        self.clients = {role: api(self.member_of(role)) for role in Role}
        self.clients["stranger"], self.clients["nobody"] = api(stranger), api(None)
        self.other = MembershipFactory(organization=owner.organization, role=Role.VIEWER)
        MembershipFactory(user__email="homeless@example.com")
        self.fill()

    def member_of(self, role: Role) -> Membership:
        return self.owner if role == Role.OWNER else MembershipFactory(organization=self.owner.organization, role=role)

    def fill(self) -> None:
        self.make("POST", "datasets/", {"name": "digits"})
        self.make("PUT", "datasets/digits/archive/", Raw(archive()))
        self.make("POST", "datasets/", {"name": "spare"})
        self.make("POST", "workspaces/", {"name": "matrix"})
        self.make("POST", "workspaces/", {"name": "spare"})
        self.save_card()
        self.restore_files()
        bought = self.make("POST", "quotes/", QUOTE).data["id"]
        self.job = self.make("POST", "orders/", {"quote": bought}).data["job"]
        self.quote = self.make("POST", "quotes/", QUOTE).data["id"]
        Voucher.objects.create(
            code="MATRIX25", reason="test", amount_minor=25, currency="USD", max_uses=99, max_uses_each=99
        )
        self.charge("first")
        self.invoice = self.make("POST", "invoices/", None).data["id"]
        self.charge("second")

    def charge(self, reference: str) -> None:
        """A receipt that stands on no invoice yet."""
        account = wallet_account(organization_id=self.owner.organization_id, currency="USD")
        hold = charges.hold(quote=quote(account, member=self.owner), reference=reference)
        charges.settle(hold=hold, usage=Usage(600, completed=True), title=reference)

    def save_card(self) -> None:
        """A saved card, and an automatic top-up from it."""
        self.provider.pay(self.make("POST", "wallet/cards/", None).data["url"].rsplit("/", 1)[1])
        (saved,) = self.send("owner", "GET", "wallet/cards/", None).data["results"]
        self.card = saved["id"]
        self.customer = self.provider.ask("GET", f"payment_methods/{self.card}")["customer"]
        wanted = {"is_on": True, "threshold_minor": 500, "amount_minor": 500, "card": self.card}
        self.make("PUT", "wallet/automatic/", wanted)

    def restore_card(self) -> None:
        """What the payment provider did is not rolled back with our database."""
        self.provider.ask("POST", f"payment_methods/{self.card}/attach", customer=self.customer)

    def restore_files(self) -> None:
        for workspace in ("matrix", "spare"):
            self.make("PUT", f"workspaces/{workspace}/files/train.py", Raw(b"print(1)"))

    def make(self, method: str, path: str, body: Any):
        answer = self.send("owner", method, path, body)
        assert answer.status_code in {200, 201}, (path, answer.data)
        return answer

    def send(self, actor: str, method: str, path: str, body: Any):
        if isinstance(body, Raw):
            extra = {"data": body.content, "content_type": "application/octet-stream"}
        else:
            extra = {"data": self.filled(body), "format": "json"}
        if method == "GET":
            extra = {}
        return getattr(self.clients[actor], method.lower())(f"/api/v1/{path}", **extra)

    def filled(self, body: Any) -> Any:
        """The body with our own objects' ids."""
        ours = {"<quote>": lambda: self.quote, "<card>": lambda: self.card}
        if not isinstance(body, dict):
            return body
        return {name: ours[value]() if str(value) in ours else value for name, value in body.items()}

    def path_of(self, route: str) -> str:
        pk = {"tokens": self.token_pk, "organization": self.other.pk, "invoices": self.invoice}.get(
            route.split("/", maxsplit=1)[0], self.job
        )
        name = "spare" if route.startswith("workspaces") else "digits"
        if route == "datasets/<str:name>/":
            name = "spare"
        if route.startswith("images"):
            name = "pytorch"
        filled = route.replace("<int:pk>", str(pk)).replace("<uuid:quote_id>", str(self.quote))
        filled = filled.replace("<str:card>", self.card)
        return filled.replace("<str:name>", name).replace("<file:path>", "train.py")

    @property
    def token_pk(self) -> int:
        return ApiToken.objects.filter(membership=self.owner).latest("id").pk

    def status(self, actor: str, method: str, route: str, body: Any = None) -> int:
        """The status that `actor` gets; whatever was changed is taken back."""
        self.restore_files()
        self.restore_card()
        with transaction.atomic():
            answer = self.send(actor, method, self.path_of(route), body)
            transaction.set_rollback(True)
        if answer.status_code >= 400:
            assert set(answer.data) <= {"code", "message", "fields"}, answer.data
            assert answer.data["code"], answer.data
            assert answer.data["message"], answer.data
        if answer.streaming and not answer.is_async:
            b"".join(answer.streaming_content)  # read to its end, which closes the file
        return answer.status_code


@pytest.fixture
def world(api, owner, stranger, provider):
    return World(api, owner, stranger, provider)


def expected(ask: Ask | None, actor: str) -> int:
    if actor == "nobody":
        return 401
    if ask is None:
        return 405
    if actor == "stranger":
        return ask.foreign
    if not (allows(actor, ask.capability) and allows(actor, ask.also)):
        return 403
    return 404 if ask.own and actor != "owner" else ask.status


@pytest.mark.parametrize("route", [route for route, asks in ROUTES.items() if asks])
def test_everybody_gets_what_the_role_allows(world, route):
    actors = ["nobody", "stranger", *(str(role) for role in Role)]
    got, due = {}, {}
    for method in METHODS:
        ask = ROUTES[route].get(method)
        for actor in actors if ask else ("nobody", "owner"):
            got[method, actor] = world.status(actor, method, route, ask.body if ask else None)
            due[method, actor] = expected(ask, actor)
    assert got == due


@pytest.mark.parametrize("route", [route for route, asks in ROUTES.items() if not asks])
def test_public_routes_are_open_to_nobody(client, route):
    assert client.get(f"/api/v1/{route}").status_code == 200


@pytest.mark.parametrize("route", [route for route, asks in ROUTES.items() if asks.get("GET") == listing()])
def test_lists_of_another_organization_show_nothing_of_ours(world, route):
    text = world.send("stranger", "GET", world.path_of(route), None).getvalue().decode()
    for ours in ("matrix", "digits", world.owner.user.email, world.owner.organization.slug):
        assert ours not in text
