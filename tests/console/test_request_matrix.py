"""Every method of every route under /api/v1/, as nobody, as another organization, and as each role.

A test fails for each route or method that is missing in `ROUTES`, so a new one must state which roles may use it.
"""

from __future__ import annotations

import io
import re
import zipfile
from base64 import b64encode
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import pytest
from django.conf import settings
from django.db import transaction
from django.utils import timezone

from billing import charges, invoice_pdf
from billing.credit import grant
from billing.ledger import wallet_account
from billing.models import CreditGrant, Voucher
from billing.pricing import Usage
from console.accounts.models import ApiToken
from console.accounts.roles import Capability, Role, allows
from jobs import activation, catalogue, clusters, results
from storage import recycle_bin, selectors, sharing, uploads
from storage.models import DeletedFile, Upload, Workspace
from tests.console.routes import routes_of
from tests.factories.accounts import MembershipFactory, UserFactory
from tests.factories.billing import quote
from tests.factories.storage import DatasetFactory, ModelVersionFactory, WorkspaceImportFactory

pytestmark = pytest.mark.django_db
VIEW, STORE, RUN, PAY, MANAGE = (
    Capability.VIEW, Capability.STORE, Capability.RUN, Capability.PAY, Capability.MANAGE,
)  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """A request: the capability that it needs, and its status for a member who has that capability.

    `foreign` is the status for the owner of another organization.
    """

    capability: Capability
    status: int = 200
    foreign: int = 404
    body: Any = None
    is_personal: bool = False
    """Whether the object is the owner's alone, so that other members of the organization get 404 too."""
    also: Capability = Capability.VIEW
    """A further capability that the method needs."""
    query: str = ""


@dataclass(frozen=True)
class Raw:
    """A body that is no JSON."""

    content: bytes = field(repr=False)
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/octet-stream"


def archive():
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("train.csv", "1,2\n")
        file.writestr("train.py", "print(1)\n")
    return packed.getvalue()


UPLOADED = {"purpose": "workspace", "name": "matrix", "path": "uploaded.bin"}


def tus(content=b"", *, length=None, metadata=None, offset=None, method=None):
    """Return the body and headers of a request of a tus client."""
    packed = [f"{name} {b64encode(value.encode()).decode()}" for name, value in (metadata or {}).items()]
    values = {
        "Tus-Resumable": "1.0.0", "Upload-Length": length, "Upload-Offset": offset, "X-HTTP-Method-Override": method,
        "Upload-Metadata": ",".join(packed),
    }  # fmt: skip
    headers = {name: str(value) for name, value in values.items() if value is not None}
    return Raw(content, headers, "application/offset+octet-stream")


def listing(capability=VIEW):
    """Return the Ask of a list: another organization gets 200 too, since the list has its own objects."""
    return Ask(capability, foreign=200)


PUBLIC = {}
"""Marks a route that answers a GET of everyone."""
QUOTE = {
    "product": "metered", "framework": "pytorch", "image": "pytorch", "workspace": "matrix", "code_path": "train.py",
    "arguments": [], "datasets": ["digits"], "epochs": 1, "lr": 0.1, "batch_size": 8, "node_spec": "nano", "nodes": 1,
    "workers_per_node": 1,
}  # fmt: skip
NOTEBOOK = {name: QUOTE[name] for name in ("image", "workspace", "datasets", "node_spec")}
SWEEP = QUOTE | {
    "space": {"LR": {"type": "float", "low": 0.01, "high": 0.1}}, "trials": 2, "method": "random",
    "objective": {"metric": "accuracy", "goal": "maximize"},
}  # fmt: skip
IMAGE = {"name": "fresh", "title": "Fresh", "reference": "registry.example.com/x:1", "frameworks": ["pytorch"]}
INSTALLATION_WIDE = "workspace-templates/"
"""A list that is the same for everyone."""
ROUTES = {
    "schema/": PUBLIC,
    "docs/": PUBLIC,
    "whoami/": {"GET": listing()},
    "tokens/": {"GET": listing(), "POST": Ask(VIEW, 201, 201, {"name": "another"})},
    "tokens/<int:pk>/": {"DELETE": Ask(VIEW, 204, is_personal=True)},
    "service-accounts/": {"GET": listing(MANAGE), "POST": Ask(MANAGE, 201, 201, {"name": "robot"})},
    "service-accounts/<int:pk>/": {"PATCH": Ask(MANAGE, body={"is_disabled": True}), "DELETE": Ask(MANAGE, 204)},
    "service-accounts/<int:pk>/tokens/": {"GET": Ask(MANAGE), "POST": Ask(MANAGE, 201, body={"name": "ci"})},
    "service-accounts/<int:pk>/tokens/<int:token_pk>/": {"DELETE": Ask(MANAGE, 204)},
    "organization/": {"GET": listing(), "PATCH": Ask(MANAGE, 200, 200, {"name": "Renamed"})},
    "organization/closure/": {
        "GET": listing(MANAGE),
        "POST": Ask(MANAGE, 400, 400, {"confirmation": "another"}),  # not the organization's slug
        "DELETE": Ask(MANAGE, 204, 204),
    },
    "organization/export/": {"GET": listing(MANAGE)},
    "organization/members/": {"GET": listing()},
    "organization/members/<int:pk>/": {
        "PATCH": Ask(MANAGE, 200, body={"role": "billing"}),
        "DELETE": Ask(MANAGE, 204),
    },
    "organization/invitations/": {
        "GET": listing(MANAGE),
        "POST": Ask(MANAGE, 201, 201, {"email": "elsewhere@example.com", "role": "viewer"}),
    },
    "organization/invitations/<int:pk>/": {"DELETE": Ask(MANAGE, 204)},
    "images/": {"GET": listing(), "POST": Ask(STORE, 201, 201, IMAGE)},
    "images/<str:name>/": {"GET": Ask(VIEW), "PATCH": Ask(STORE, body={"title": "Renamed"}), "DELETE": Ask(STORE, 204)},
    "datasets/": {"GET": listing(), "POST": Ask(STORE, 201, 201, {"name": "fresh"})},
    "datasets/<str:name>/": {"GET": Ask(VIEW), "DELETE": Ask(STORE, 204)},
    "datasets/<str:name>/archive/": {"PUT": Ask(STORE, 201, body=Raw(archive()))},
    "datasets/<str:name>/files/": {"GET": Ask(VIEW)},
    "datasets/<str:name>/files/<file:path>": {"GET": Ask(VIEW)},
    # imports are turned off by default
    "datasets/<str:name>/imports/": {"GET": Ask(VIEW), "POST": Ask(STORE, 400, body={"url": "https://example.com/f"})},
    "datasets/<str:name>/shares/": {"GET": Ask(VIEW), "POST": Ask(STORE, 201, body={"label": "Acme"})},
    "datasets/<str:name>/shares/<int:pk>/": {"DELETE": Ask(STORE, 204)},
    "shared-datasets/": {"GET": listing(), "POST": Ask(STORE, 201, 201, {"code": "<code>"})},
    "shared-datasets/<str:name>/": {"DELETE": Ask(STORE, 204)},
    "datasets/<str:name>/versions/": {"POST": Ask(STORE, 201, body={"workspace": "matrix", "path": "train.py"})},
    "datasets/<str:name>/versions/<int:number>/": {"DELETE": Ask(STORE, 409)},  # an open job reads it
    "uploads/": {"GET": listing(), "POST": Ask(STORE, 201, body=tus(length=4, metadata=UPLOADED))},
    "uploads/<uuid:key>/": {
        "GET": Ask(VIEW),
        "POST": Ask(STORE, 204, body=tus(b"1", offset=0, method="PATCH")),  # for clients that cannot send a PATCH
        "PATCH": Ask(STORE, 204, body=tus(b"1", offset=0)),
        "DELETE": Ask(STORE, 204, body=tus()),
    },
    # 400: no bucket is configured, and the upload below is one by tus, which has no parts
    "uploads/direct/": {"POST": Ask(STORE, 400, 400, {"size_bytes": 4} | UPLOADED)},
    "uploads/<uuid:key>/parts/": {"GET": Ask(VIEW, 400), "POST": Ask(STORE, 400, body={"numbers": [1]})},
    "uploads/<uuid:key>/complete/": {"POST": Ask(STORE, 400)},
    "models/": {"GET": listing(), "POST": Ask(STORE, 201, body={"name": "net", "job": "<job>", "path": "outputs"})},
    "models/<str:name>/": {"GET": Ask(VIEW), "DELETE": Ask(STORE, 204)},
    "models/<str:name>/archive/": {"GET": Ask(VIEW)},
    "models/<str:name>/versions/<int:number>/": {"DELETE": Ask(STORE, 204)},
    "storage/": {"GET": listing()},
    "storage/deleted/<str:kind>/<int:pk>/": {"DELETE": Ask(STORE, 204)},
    "storage/deleted/<str:kind>/<int:pk>/restore/": {"POST": Ask(STORE, 204)},
    "workspaces/": {"GET": listing(), "POST": Ask(STORE, 201, 201, {"name": "fresh"})},
    "workspace-imports/": {"GET": listing()},
    "workspace-imports/<int:pk>/": {"GET": Ask(VIEW)},
    "workspaces/<str:name>/": {"GET": Ask(VIEW), "DELETE": Ask(STORE, 204)},
    "workspaces/<str:name>/files/": {"GET": Ask(VIEW)},
    "workspaces/<str:name>/files/<file:path>": {
        "GET": Ask(VIEW),
        "PUT": Ask(STORE, 200, body=Raw(b"print(2)")),
        "DELETE": Ask(STORE, 204),
    },
    "registries/": {"GET": listing()},
    "registries/<str:host>/": {
        "PUT": Ask(STORE, 200, 200, {"username": "me", "password": "of-the-matrix"}),
        "DELETE": Ask(STORE, 204),
    },
    "secrets/": {"GET": listing()},
    "secrets/<str:name>": {
        "PUT": Ask(STORE, 200, 201, {"value": "of-the-matrix"}),  # the other organization creates its own
        "DELETE": Ask(STORE, 204),
    },
    INSTALLATION_WIDE: {"GET": listing()},
    "workspaces/<str:name>/archive/": {"GET": Ask(VIEW)},
    "workspaces/<str:name>/compare/": {"POST": Ask(VIEW, body={"files": []})},
    "workspaces/<str:name>/copy/": {"POST": Ask(STORE, 201, body={"path": "train.py", "target": "copy.py"})},
    "workspaces/<str:name>/search/": {"GET": Ask(VIEW, query="?q=train")},
    "workspaces/<str:name>/bin/": {"GET": Ask(VIEW), "DELETE": Ask(STORE, 204)},
    "workspaces/<str:name>/bin/<int:pk>/": {"DELETE": Ask(STORE, 204)},
    "workspaces/<str:name>/bin/<int:pk>/restore/": {"POST": Ask(STORE, 200)},
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
    "invoices/": {"GET": listing(PAY), "POST": Ask(PAY, 201, 204)},  # the other organization has no charges
    "invoices/<int:pk>/": {"GET": Ask(PAY)},
    "invoices/<int:pk>/pdf/": {"GET": Ask(PAY)},
    "invoices/<int:pk>/csv/": {"GET": Ask(PAY)},
    "search/": {"GET": listing()},
    "products/": {"GET": listing()},
    "services/distributed-training/activate/": {"POST": Ask(MANAGE, 200, 200, {"accept_terms": True})},
    "services/distributed-training/deactivate/": {"POST": Ask(MANAGE, 204, 204)},
    # the other organization has no workspace `matrix` (400), and cannot buy our quotes (404)
    "quotes/": {"POST": Ask(RUN, 201, 400, QUOTE)},
    "quotes/<uuid:quote_id>/": {"GET": Ask(VIEW)},
    "quotes/<uuid:quote_id>/comparison/": {"GET": Ask(VIEW)},
    "quotes/<uuid:quote_id>/environment/": {"GET": Ask(VIEW)},
    "quotes/<uuid:quote_id>/pay/": {"POST": Ask(PAY, 201, also=RUN)},
    "orders/": {"POST": Ask(RUN, 201, 404, {"quote": "<quote>"})},
    "probes/": {"POST": Ask(RUN, 201, 400, QUOTE)},
    "sweeps/quotes/": {"POST": Ask(RUN, 201, 400, SWEEP)},
    "sweeps/": {"GET": listing(), "POST": Ask(RUN, 201, 404, {"quote": "<sweep quote>"})},
    "sweeps/<int:pk>/": {"GET": Ask(VIEW)},
    "sweeps/<int:pk>/trials/": {"GET": Ask(VIEW)},
    "sweeps/<int:pk>/stop/": {"POST": Ask(RUN)},
    "sweeps/<int:pk>/extend/": {"POST": Ask(RUN, 400, body={"trials": 2})},  # the sweep has not ended
    "sweeps/<int:pk>/receipt/": {"GET": Ask(VIEW)},
    "notebooks/quotes/": {"POST": Ask(RUN, 201, 400, NOTEBOOK)},
    "notebooks/": {"GET": listing(), "POST": Ask(RUN, 201, 404, {"quote": "<notebook quote>"})},
    "notebooks/<int:pk>/": {"GET": Ask(VIEW)},
    "notebooks/<int:pk>/extend/": {"POST": Ask(RUN, 409, body={"added_seconds": 3600})},  # it has not started
    "notebooks/<int:pk>/stop/": {"POST": Ask(RUN)},
    "jobs/": {"GET": listing()},
    "jobs/<int:pk>/": {"GET": Ask(VIEW), "PATCH": Ask(STORE, body={"notes": "x"})},
    "jobs/<int:pk>/cancel/": {"POST": Ask(RUN)},
    "jobs/<int:pk>/tensorboard/": {"POST": Ask(VIEW, 409)},  # it has not started
    "jobs/<int:pk>/rerun/": {"POST": Ask(RUN, 201)},
    "jobs/<int:pk>/logs/": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/logs/search/": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/stream/": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/metrics/": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/curves/": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/telemetry/": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/stacks/": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/check/": {"GET": Ask(VIEW)},
    # a built-in image, which every organization can check
    "images/<str:name>/check/": {"POST": Ask(RUN, 201, 201, {"node_spec": "nano", "nodes": 1})},
    "jobs/<int:pk>/packages/": {"GET": Ask(VIEW, 404)},  # its workspace has no requirements file
    "jobs/<int:pk>/diagnosis/": {"GET": Ask(VIEW, 404)},  # the job has not failed
    "jobs/<int:pk>/events/": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/environment/": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/configuration/": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/files/": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/files/<file:path>": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/archive/": {"GET": Ask(VIEW)},
    "jobs/<int:pk>/results/": {"DELETE": Ask(STORE, 409)},  # the job has not ended
    "jobs/<int:pk>/receipt/": {"GET": Ask(VIEW, 404)},  # the job has not ended
}


def methods_of(pattern):
    """Return the methods that a route's view answers."""
    view = getattr(pattern.callback, "cls", None) or pattern.callback.view_class
    return {name.upper() for name in view.http_method_names if hasattr(view, name)} - {"HEAD", "OPTIONS"}


def test_every_route_and_method_is_in_the_table():
    served = {route.removeprefix("api/v1/"): pattern for route, pattern in routes_of() if route.startswith("api/v1/")}
    public = {route: {"GET"} for route, asks in ROUTES.items() if asks is PUBLIC}
    assert {route: methods_of(pattern) for route, pattern in served.items()} == {
        route: set(asks) for route, asks in ROUTES.items()
    } | public


@pytest.mark.parametrize("route", ["healthz", "readyz", "metrics"])
def test_only_operators_read_metrics_and_everyone_reads_the_health(client, owner, settings, route):
    settings.METRICS_TOKEN = "of-the-operator"
    get = lambda **headers: client.get(f"/{route}", headers=headers).status_code
    # An anonymous client, a customer and an administrator. None has the token, which metrics need.
    statuses = [get()]
    for user in (owner.user, UserFactory(is_staff=True, is_superuser=True)):
        client.force_login(user)
        statuses.append(get())
    client.logout()
    assert statuses == [404 if route == "metrics" else 200] * 3
    assert get(Authorization="Bearer of-the-operator") == 200
    assert {client.generic(method, f"/{route}").status_code for method in ("POST", "PUT", "PATCH", "DELETE")} == {405}


class World:
    """Two customers; the first has one of everything, and one member of each role.

    Rendering PDFs, and counting requests and uses of tokens, are left out: other tests check them, and here each
    request would repeat them.
    """

    def __init__(self, api, owner, stranger, provider, monkeypatch):
        self.api, self.owner, self.provider = api, owner, provider
        monkeypatch.setattr(settings, "API_REQUESTS_PER_MINUTE", 0)
        monkeypatch.setattr(invoice_pdf, "_render", lambda _invoice, _language: b"%PDF-1.7")
        catalogue.seed()
        for membership in (owner, stranger):
            activation.activate(membership=membership, accept_terms=True)
            wallet = wallet_account(organization_id=membership.organization_id, currency="USD")
            credit = CreditGrant(organization=membership.organization, amount_minor=10_000, reason="test")
            grant(credit_grant=credit, user=membership.user, account=wallet)
        self.clients = {role: api(self.member_of(role)) for role in Role}
        self.clients["stranger"], self.clients["nobody"] = api(stranger), api(None)
        self.other = MembershipFactory(organization=owner.organization, role=Role.VIEWER)
        MembershipFactory(user__email="elsewhere@example.com")  # of a third organization, so it can be invited here
        self.fill()
        ApiToken.objects.update(last_used_at=timezone.now() + timedelta(days=1))  # so that no request updates it

    def member_of(self, role):
        return self.owner if role == Role.OWNER else MembershipFactory(organization=self.owner.organization, role=role)

    def fill(self):
        """Create one of everything, as the owner does through the API."""
        self.token = ApiToken.objects.get(membership=self.owner).pk
        self.make("POST", "datasets/", {"name": "digits"})
        self.make("PUT", "secrets/MATRIX", {"value": "of-the-matrix"})
        self.make("PUT", "registries/matrix.example.com/", {"username": "me", "password": "of-the-matrix"})
        self.make("POST", "images/", IMAGE | {"name": "own"})
        self.make("PUT", "datasets/digits/archive/", Raw(archive()))
        self.make("POST", "datasets/", {"name": "spare"})
        ModelVersionFactory(model__organization=self.owner.organization, model__name="net", number=1)
        self.share = self.make("POST", "datasets/digits/shares/", {"label": "Acme"}).data["id"]
        self.make("POST", "shared-datasets/", {"code": self.code_of("lent")})
        self.code = self.code_of("offered")
        self.make("POST", "workspaces/", {"name": "matrix"})
        self.make("POST", "workspaces/", {"name": "spare"})
        self.service_account = self.make("POST", "service-accounts/", {"name": "matrix"}).data["id"]
        path = f"service-accounts/{self.service_account}/tokens/"
        self.service_token = self.make("POST", path, {"name": "ci"}).data["id"]
        invited = {"email": "invited@example.com", "role": "viewer"}
        self.invitation = self.make("POST", "organization/invitations/", invited).data["id"]
        self.make("POST", "uploads/", tus(length=4, metadata=UPLOADED))
        self.upload = Upload.objects.get().key
        self.workspace_import = WorkspaceImportFactory(organization=self.owner.organization).pk
        self.make("POST", "workspaces/", {"name": "matrix-gone"})
        self.deleted = Workspace.objects.get(name="matrix-gone").pk
        assert self.send("owner", "DELETE", "workspaces/matrix-gone/", None).status_code == 204
        self.save_card()
        self.make("PUT", "workspaces/spare/files/deleted.txt", Raw(b"deleted"))
        assert self.send("owner", "DELETE", "workspaces/spare/files/deleted.txt", None).status_code == 204
        self.binned = DeletedFile.objects.get()
        self.folders = [selectors.workspace_folder(Workspace.objects.get(name=name)) for name in ("matrix", "spare")]
        for name in ("matrix", "spare"):
            self.make("PUT", f"workspaces/{name}/files/train.py", Raw(b"print(1)"))
        bought_quote = self.make("POST", "quotes/", QUOTE).data["id"]
        self.job = self.make("POST", "orders/", {"quote": bought_quote}).data["job"]
        outputs = clusters.cluster().output_folder(results.checkpoint_key(self.job))
        outputs.mkdir(parents=True)
        (outputs / "train.py").write_text("result")
        self.quote = self.make("POST", "quotes/", QUOTE).data["id"]
        bought_quote = self.make("POST", "sweeps/quotes/", SWEEP).data["id"]
        self.sweep = self.make("POST", "sweeps/", {"quote": bought_quote}).data["id"]
        self.sweep_quote = self.make("POST", "sweeps/quotes/", SWEEP).data["id"]
        bought_quote = self.make("POST", "notebooks/quotes/", NOTEBOOK).data["id"]
        self.notebook = self.make("POST", "notebooks/", {"quote": bought_quote}).data["id"]
        self.notebook_quote = self.make("POST", "notebooks/quotes/", NOTEBOOK).data["id"]
        Voucher.objects.create(
            code="MATRIX25", reason="test", amount_minor=25, currency="USD", max_uses=99, max_uses_each=99
        )
        self.charge("first")
        self.invoice = self.make("POST", "invoices/", None).data["id"]
        self.charge("second")

    def code_of(self, name):
        """Return the code of a dataset that a third organization shares."""
        return sharing.create_share(dataset=DatasetFactory(name=name), user=None, label="Matrix")[1]

    def charge(self, reference):
        """Create a receipt that is on no invoice yet."""
        account = wallet_account(organization_id=self.owner.organization_id, currency="USD")
        hold = charges.hold(quote=quote(account, member=self.owner), reference=reference)
        charges.settle(hold=hold, usage=Usage(billable_seconds=600, completed=True), title=reference)

    def save_card(self):
        """Save a card, and switch on automatic top-ups from it."""
        self.provider.pay(self.make("POST", "wallet/cards/", None).data["url"].rsplit("/", 1)[1])
        (saved,) = self.send("owner", "GET", "wallet/cards/", None).data["results"]
        self.card = saved["id"]
        self.customer = self.provider.ask("GET", f"payment_methods/{self.card}")["customer"]
        wanted = {"is_on": True, "threshold_minor": 500, "amount_minor": 500, "card": self.card}
        self.make("PUT", "wallet/automatic/", wanted)

    def restore_card(self):
        """Attach the card again: what the payment provider did is not rolled back with our database."""
        self.provider.ask("POST", f"payment_methods/{self.card}/attach", customer=self.customer)

    def restore_files(self):
        """Restore the files: what a request did to them is not rolled back with our database either."""
        (uploads.folder() / self.upload.hex).write_bytes(b"")
        recycle_bin.path_in_bin(self.binned).write_text("deleted")
        for folder in self.folders:
            (folder / "copy.py").unlink(missing_ok=True)
            (folder / "train.py").write_text("print(1)")

    @cached_property
    def authenticated(self):
        """The owner's token with its rows, as authentication finds it."""
        related = ApiToken.objects.select_related("membership__user", "membership__organization__quota")
        token = related.get(pk=self.token)
        token.membership.scopes = token.scope_set()
        return token

    def skip_token_look_up(self):
        """Authenticate the owner's next request from memory: to look up its token takes a quarter of the time."""
        token = deepcopy(self.authenticated)  # since a request may change its rows
        self.clients["owner"].force_authenticate(token.membership.user, token)

    def make(self, method, path, body):
        answer = self.send("owner", method, path, body)
        assert answer.status_code in {200, 201}, (path, answer.data)
        return answer

    def send(self, actor, method, path, body):
        if isinstance(body, Raw):
            extra = {"data": body.content, "content_type": body.content_type, "headers": body.headers}
        else:
            extra = {"data": self.replace_placeholders(body), "format": "json"}
        if method == "GET":
            extra = {}
        return getattr(self.clients[actor], method.lower())(f"/api/v1/{path}", **extra)

    def replace_placeholders(self, body):
        """Return the body with ids of the owner's objects in place of placeholders such as `<quote>`."""
        ours = {
            "<quote>": lambda: self.quote,
            "<sweep quote>": lambda: self.sweep_quote,
            "<notebook quote>": lambda: self.notebook_quote,
            "<card>": lambda: self.card,
            "<job>": lambda: self.job,
            "<code>": lambda: self.code,
        }
        if not isinstance(body, dict):
            return body
        return {name: ours[value]() if str(value) in ours else value for name, value in body.items()}

    def path_of(self, route):
        section = route.split("/", maxsplit=1)[0]
        pks = {
            "organization": self.other.pk,
            "invoices": self.invoice,
            "sweeps": self.sweep,
            "notebooks": self.notebook,
            "storage": self.deleted,
            "workspaces": self.binned.pk,
            "datasets": self.share,
            "workspace-imports": self.workspace_import,
            "service-accounts": self.service_account,
            "tokens": self.token,
        }
        pk = self.invitation if route.startswith("organization/invitations") else pks.get(section, self.job)
        names = {
            "workspaces": "spare",
            "images": "pytorch",
            "models": "net",
            "secrets": "MATRIX",
            "shared-datasets": "lent",
        }
        # Of the route, else of its section, else `digits`. A DELETE needs an object that no job uses: `spare`, `own`.
        name = {"datasets/<str:name>/": "spare", "images/<str:name>/": "own"}.get(route, names.get(section, "digits"))
        file = "outputs/train.py" if section == "jobs" else "train.py"
        parts = {
            "<int:pk>": pk, "<int:token_pk>": self.service_token, "<uuid:quote_id>": self.quote,
            "<str:card>": self.card, "<str:kind>": "workspaces",
            "<str:host>": "matrix.example.com",
            "<uuid:key>": self.upload, "<int:number>": 1, "<str:name>": name, "<file:path>": file,
        }  # fmt: skip
        return re.sub(r"<\w+:\w+>", lambda match: str(parts[match[0]]), route)

    def answer(self, actor, method, route, body=None, query=""):
        """Return the status and the text that `actor`, a key of `clients`, gets, and undo what the request changed."""
        with transaction.atomic():
            answer = self.send(actor, method, self.path_of(route) + query, body)
            transaction.set_rollback(True)
        if answer.status_code >= 400:
            assert set(answer.data) <= {"code", "message", "fields"}, answer.data
            assert answer.data["code"], answer.data
            assert answer.data["message"], answer.data
        content = b"" if answer.streaming and answer.is_async else answer.getvalue()  # reading all closes the file
        if method != "GET" and answer.status_code < 400:
            self.restore_files()
            if route.startswith("wallet/cards/"):
                self.restore_card()
        return answer.status_code, content.decode(errors="replace")


@pytest.fixture
def world(api, owner, stranger, provider, monkeypatch):
    return World(api, owner, stranger, provider, monkeypatch)


def expected(ask, actor):
    if actor == "nobody":
        return 401
    if actor == "stranger":
        return ask.foreign
    if not (allows(actor, ask.capability) and allows(actor, ask.also)):
        return 403
    return 404 if ask.is_personal and actor != "owner" else ask.status


def test_everyone_gets_what_their_role_allows_and_lists_show_nothing_of_another_organization(world):
    actors = ["nobody", "stranger", *(str(role) for role in Role)]
    ours = ("matrix", "digits", world.owner.user.email, world.owner.organization.slug)
    actual, wanted, leaks = {}, {}, set()
    for route, asks in ROUTES.items():
        for method, ask in asks.items():
            for actor in actors:
                key = (method, route, actor)
                actual[key], text = world.answer(actor, method, route, ask.body, ask.query)
                wanted[key] = expected(ask, actor)
                is_their_list = (method, actor) == ("GET", "stranger") and actual[key] == 200
                if is_their_list and route != INSTALLATION_WIDE:
                    leaks |= {(route, each) for each in ours if each in text}
    assert actual == wanted
    assert leaks == set()
    # The route has no PUT: only clients with a token learn this.
    assert [world.answer(actor, "PUT", "whoami/")[0] for actor in ("nobody", "owner")] == [401, 405]


def test_public_routes_are_open_to_everyone(client):
    for route in (route for route, asks in ROUTES.items() if asks is PUBLIC):
        assert client.get(f"/api/v1/{route}").status_code == 200
