"""Node specs, published prices, wallets with money in them, quotes at a price, and what Stripe would send."""

from __future__ import annotations

import json
import time
import uuid
from decimal import Decimal
from typing import Any

import factory
import stripe
from django.utils import timezone
from factory.django import DjangoModelFactory

from billing import gateway, ledger, payments, pricebooks, pricing
from billing.models import Account, NodeSpec, Price, PriceBook, Quote, TopUp
from billing.quotes import make_quote
from console.accounts.models import Membership, Organization
from tests.factories.accounts import MembershipFactory, OrganizationFactory
from tests.provider import GOOD, Stripe


class NodeSpecFactory(DjangoModelFactory):
    """A small node."""

    class Meta:
        model = NodeSpec

    name = factory.Sequence(lambda n: f"spec-{n}")
    title = factory.LazyAttribute(lambda spec: spec.name.title())
    cpus = Decimal(1)
    memory_mib = 1024


class PriceBookFactory(DjangoModelFactory):
    """A draft without prices."""

    class Meta:
        model = PriceBook

    name = factory.Sequence(lambda n: f"Book {n}")
    currency = "USD"


class PriceFactory(DjangoModelFactory):
    """An hourly price, at which ten seconds of a node cost one minor unit."""

    class Meta:
        model = Price

    book = factory.SubFactory(PriceBookFactory)
    kind = pricing.PriceKind.NODE_HOUR
    node_spec = factory.SubFactory(NodeSpecFactory)
    amount = Decimal(360)


class TopUpFactory(DjangoModelFactory):
    """A top-up whose payment page is open."""

    class Meta:
        model = TopUp

    account = factory.LazyAttribute(lambda _top_up: wallet())
    amount_minor = 5000
    currency = "USD"
    state = TopUp.States.PENDING
    session_id = factory.Sequence(lambda n: f"cs_test_{n}")


def paid_top_up(
    provider: Stripe, *, card: str = GOOD, amount_minor: int = 5000, deliver: bool = True, currency: str = "USD"
) -> TopUp:
    """Return a top-up that was paid at the provider's page. With `deliver`, the console has received its events."""
    member = MembershipFactory()
    top_up = payments.start_top_up(
        account=wallet(member.organization, currency=currency),
        amount_minor=amount_minor,
        user=member.user,
        save_card=True,
    )
    provider.pay(top_up.session_id, card)
    if deliver:
        provider.deliver()
    top_up.refresh_from_db()
    return top_up


def book(currency: str = "USD", *, hourly: str = "360", minimum: str = "", storage: str = "") -> PriceBook:
    """Publish a price book with one hourly price for every node spec on offer. If there is none, create one.

    `minimum` and `storage` are the minimum charge and the price of storage, if the book has them.
    """
    draft = PriceBookFactory(currency=currency)
    for spec in NodeSpec.objects.filter(is_active=True) or [NodeSpecFactory(name="small")]:
        PriceFactory(book=draft, node_spec=spec, amount=Decimal(hourly))
    if minimum:
        PriceFactory(book=draft, kind=pricing.PriceKind.MINIMUM, node_spec=None, amount=Decimal(minimum))
    if storage:
        PriceFactory(book=draft, kind=pricing.PriceKind.STORAGE, node_spec=None, amount=Decimal(storage))
    return pricebooks.publish(book=draft)


def wallet(organization: Organization | None = None, *, currency: str = "USD", balance_minor: int = 0) -> Account:
    """Return a wallet with this balance, which the ledger has posted."""
    owner = organization or OrganizationFactory()
    account = ledger.wallet_account(organization_id=owner.pk, currency=currency)
    if balance_minor:
        clearing = ledger.platform_account(Account.Kinds.CLEARING, currency)
        ledger.post(
            reference=f"test:{uuid.uuid4()}",
            kind="top-up",
            description="For a test",
            entries=[(account, balance_minor), (clearing, -balance_minor)],
        )
        account.refresh_from_db()
    return account


def quote(
    account: Account, *, member: Membership | None = None, seconds: int = 3600, epochs: int = 1, nodes: int = 1
) -> Quote:
    """Return a quote of metered time at the current book's first price. Its ceiling pays for exactly `seconds`."""
    membership = member or MembershipFactory(organization=account.organization)
    prices = pricebooks.current_book(currency=account.currency).prices.filter(kind=pricing.PriceKind.NODE_HOUR)
    return make_quote(
        organization=membership.organization,
        user=membership.user,
        purchase=pricing.Purchase("metered", pricing.Mode.METERED, prices.first().node_spec.name, nodes, epochs),
        payload={},
        estimate=pricing.Estimate(seconds / 2, seconds * 0.75, "reference"),  # p50 and p90 below the limit
        headroom=Decimal(2),
        max_deadline_seconds=7 * 24 * 3600,
        max_seconds=seconds,
        ceiling_minor=None,
    )


def session_event(top_up: TopUp, *, kind: str = "checkout.session.completed", **changes: Any) -> dict[str, Any]:
    """Return a Checkout Session's event as Stripe sends it. `changes` are fields of the session, except `livemode`."""
    livemode = changes.pop("livemode", False)
    session = {
        "id": top_up.session_id,
        "object": "checkout.session",
        "client_reference_id": str(top_up.pk),
        "amount_total": top_up.amount_minor,
        "currency": top_up.currency.lower(),
        "payment_status": "paid",
        "status": "expired" if kind.endswith("expired") else "complete",
    } | changes
    return {
        "id": f"evt_{uuid.uuid4().hex}",
        "object": "event",
        "type": kind,
        "created": int(timezone.now().timestamp()),
        "livemode": livemode,
        "data": {"object": session},
    }


def signed(event: Any, *, secret: str = "", at: float | None = None) -> tuple[bytes, str]:
    """Return the raw body of a webhook and its signature header, signed by Stripe's own client."""
    body = event if isinstance(event, str) else json.dumps(event)
    stamp = int(time.time() if at is None else at)
    header = stripe.WebhookSignature.generate_signature_header(body, secret or gateway.webhook_secrets()[0], stamp)
    return body.encode(), header
