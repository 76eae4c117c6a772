"""Everything that is kept about a person, or about an organization, as one ZIP archive of JSON and CSV files.

The archive is built while it is sent. Rows are read in batches by primary key, so an archive of any size needs little
memory and no long transaction. It contains no secrets, and of tokens and webhooks only what pages show.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime
from typing import Any

from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from allauth.socialaccount.models import SocialAccount
from allauth.usersessions.models import UserSession
from django.db.models import Exists, OuterRef, QuerySet

from billing.exports import costs_csv, csv_row, escape_formula
from billing.models import (
    Account,
    BillingDetails,
    Budget,
    CreditGrant,
    Entry,
    Invoice,
    Receipt,
    Refund,
    TopUp,
)
from console.accounts import openid
from console.accounts.models import ApiToken, AuditEvent, Invitation, Membership, Organization, User
from console.accounts.services import record_audit_event
from console.core.zip_stream import zip_stream
from console.notifications import services as notifications
from console.notifications.models import Notification, Webhook
from jobs import exports, job_search
from jobs.job_search import JobSearch
from jobs.models import Job, MetricPoint, Order, Trial
from storage.models import DatasetVersion, Image, ModelVersion, Registry, Secret, Workspace

BATCH_SIZE = 1000
"""Rows that one query reads: enough that the number of queries is small, few enough to hold in memory."""
ArchiveFiles = Iterator[tuple[str, Iterable[str]]]
"""The files of an archive: the name of each, and its text in parts."""


def export_person(*, user: User) -> Iterator[bytes]:
    """Return the archive of what is kept about a person, in parts, and write an audit log entry."""
    record_audit_event(organization=None, actor=user, action="account.exported", target=user.email)
    return zip_stream(_person_files(user))


def export_organization(*, membership: Membership) -> Iterator[bytes]:
    """Return the archive of an organization, in parts, and write an audit log entry. The caller checks the role."""
    organization = membership.organization
    record_audit_event(
        organization=organization, actor=membership.user, action="organization.exported", target=organization.slug
    )
    return zip_stream(_organization_files(organization))


def _person_files(user: User) -> ArchiveFiles:
    """Yield the files of the archive about a person."""
    memberships = list(user.memberships.select_related("organization").order_by("pk"))
    profile = {
        "email": user.email,
        "created_at": user.date_joined,
        "last_login": user.last_login,
        "language": user.language,
        "time_zone": user.time_zone,
        "browser_time_zone": user.browser_time_zone,
        "addresses": list(EmailAddress.objects.filter(user=user).values("email", "verified", "primary")),
        "second_factors": list(Authenticator.objects.filter(user=user).values("type", "created_at", "last_used_at")),
        "single_sign_on": list(
            SocialAccount.objects.filter(user=user).values("provider", "uid", "extra_data", "date_joined", "last_login")
        ),
        # Other services that have a valid token of OpenID to act for the person.
        "services": [client.name for client in openid.clients_of(user)],
    }
    yield "profile.json", [_json(profile)]
    yield "memberships.csv", _table(
        user.memberships.all(), organization="organization__name", slug="organization__slug", role="role",
        since="created_at",
    )  # fmt: skip
    # By organization: of which kinds of notifications the person gets emails.
    settings = [
        {"organization": member.organization.slug, "mailed": notifications.choices_of(member)} for member in memberships
    ]
    yield "notification_settings.json", [_json(settings)]
    yield "tokens.csv", _tokens(ApiToken.objects.filter(membership__user=user))
    yield "sessions.csv", _table(
        UserSession.objects.filter(user=user), began_at="created_at", last_seen_at="last_seen_at", address="ip",
        browser="user_agent",
    )  # fmt: skip
    yield "audit.csv", _audit(AuditEvent.objects.filter(actor=user))
    yield "invitations.csv", _table(
        Invitation.objects.filter(email=user.email), organization="organization__name", role="role",
        created_at="created_at", expires_at="expires_at", accepted_at="accepted_at", revoked_at="revoked_at",
    )  # fmt: skip
    yield "orders.csv", _orders(Order.objects.filter(placed_by=user))


def _organization_files(organization: Organization) -> ArchiveFiles:
    """Yield the files of the archive about an organization."""
    details = BillingDetails.objects.filter(organization=organization)
    profile = {
        "name": organization.name,
        "slug": organization.slug,
        "created_at": organization.created_at,
        "billing_details": details.values("name", "address", "tax_id").first(),
        "budgets": list(Budget.objects.filter(organization=organization).values("user__email", "amount_minor")),
        "secrets": list(Secret.objects.filter(organization=organization).values_list("name", flat=True)),
        "registries": list(Registry.objects.filter(organization=organization).values("host", "username")),
        "webhooks": list(Webhook.objects.filter(organization=organization).values("url", "kinds")),
    }
    yield "organization.json", [_json(profile)]
    yield "members.csv", _table(organization.memberships.all(), email="user__email", role="role", since="created_at")
    yield "invitations.csv", _table(
        organization.invitations.all(), email="email", role="role", created_at="created_at", expires_at="expires_at",
        accepted_at="accepted_at", revoked_at="revoked_at",
    )  # fmt: skip
    yield "tokens.csv", _tokens(ApiToken.objects.filter(membership__organization=organization))
    yield "audit.csv", _audit(AuditEvent.objects.filter(organization=organization))
    yield (
        "notifications.csv",
        _table(Notification.objects.filter(organization=organization), at="created_at", kind="kind", data="data"),
    )
    yield "orders.csv", _orders(organization.orders.all())
    yield "jobs.csv", exports.jobs_csv(job_search.export(organization, JobSearch.parse({})))  # no filter: all jobs
    yield "metrics.csv", _metrics(organization)
    yield "sweeps.csv", _table(
        organization.sweeps.all(), id="id", name="name", created_at="created_at", ended_at="ended_at", state="state",
        reason="reason", extends="extends", by="placed_by__email", purchase="quote__purchase",
        ceiling_minor="quote__ceiling_minor", currency="quote__currency",
    )  # fmt: skip
    yield "trials.csv", _table(
        Trial.objects.filter(sweep__organization=organization), sweep="sweep", number="number", job="job",
        outcome="outcome", value="value", parameters="parameters", charged_minor="job__order__hold__charged_minor",
        currency="job__order__quote__currency",
    )  # fmt: skip
    receipts = Receipt.objects.filter(organization=organization).select_related("hold__placed_by")
    yield "receipts.csv", costs_csv(_iterate(receipts))
    yield "invoices.csv", _table(
        Invoice.objects.filter(organization=organization), number="number", kind="kind", issued_at="issued_at",
        period_start="period_start", period_end="period_end", subtotal_minor="subtotal_minor",
        credits_minor="credits_minor", tax_minor="tax_minor", total_minor="total_minor", currency="currency",
    )  # fmt: skip
    # In the ledger: the organization's wallet, and its accounts for receivable and written-off amounts.
    accounts = Account.objects.filter(organization=organization)
    yield "ledger.csv", _table(
        Entry.objects.filter(account__in=accounts), at="transaction__created_at", account="account__kind",
        kind="transaction__kind", reference="transaction__reference", description="transaction__description",
        amount_minor="amount_minor", currency="account__currency",
    )  # fmt: skip
    yield "top_ups.csv", _table(
        TopUp.objects.filter(account__in=accounts), id="id", created_at="created_at", paid_at="paid_at", state="state",
        origin="origin", by="created_by__email", amount_minor="amount_minor", currency="currency",
    )  # fmt: skip
    yield "refunds.csv", _table(
        Refund.objects.filter(top_up__account__in=accounts), id="id", top_up="top_up", created_at="created_at",
        ended_at="ended_at", state="state", reason="reason", amount_minor="amount_minor", currency="top_up__currency",
    )  # fmt: skip
    yield "credit.csv", _table(
        CreditGrant.objects.filter(organization=organization), created_at="created_at", source="source",
        reason="reason", expires_at="expires_at", amount_minor="amount_minor", used_minor="used_minor",
        expired_minor="expired_minor",
    )  # fmt: skip
    yield "datasets.csv", _table(
        DatasetVersion.objects.filter(dataset__organization=organization), name="dataset__name", version="number",
        published_at="published_at", size_bytes="size_bytes", deleted_at="deleted_at",
    )  # fmt: skip
    yield "models.csv", _table(
        ModelVersion.objects.filter(model__organization=organization), name="model__name", version="number",
        published_at="published_at", size_bytes="size_bytes", deleted_at="deleted_at",
    )  # fmt: skip
    yield "workspaces.csv", _table(
        Workspace.objects.filter(organization=organization), name="name", created_at="created_at",
        size_bytes="size_bytes", deleted_at="deleted_at",
    )  # fmt: skip
    yield (
        "images.csv",
        _table(Image.objects.filter(organization=organization), name="name", title="title", reference="reference"),
    )


def _tokens(tokens: QuerySet[ApiToken]) -> Iterator[str]:
    return _table(
        tokens, organization="membership__organization__name", email="membership__user__email", name="name",
        prefix="prefix", scopes="scopes", created_at="created_at", expires_at="expires_at",
        last_used_at="last_used_at", revoked_at="revoked_at",
    )  # fmt: skip


def _audit(events: QuerySet[AuditEvent]) -> Iterator[str]:
    """Yield audit log entries as CSV. `deleted_actor` is the address of an actor whose account was deleted since."""
    return _table(
        events, at="created_at", organization="organization__name", actor="actor__email",
        deleted_actor="actor_email", action="action",
        target="target", data="data", address="address",
    )  # fmt: skip


def _orders(orders: QuerySet[Order]) -> Iterator[str]:
    return _table(
        orders, id="id", created_at="created_at", organization="organization__name", by="placed_by__email",
        job="job__id", product="product__name", purchase="quote__purchase", ceiling_minor="quote__ceiling_minor",
        charged_minor="hold__charged_minor", currency="quote__currency",
    )  # fmt: skip


def _metrics(organization: Organization) -> Iterator[str]:
    """Yield the points of all curves of an organization as CSV."""
    columns = ("job", "attempt", "name", "step", "epoch", "value", "at")
    yield csv_row(columns)
    has_points = Exists(MetricPoint.objects.filter(job=OuterRef("pk")))
    for job in _iterate(Job.objects.filter(has_points, organization=organization).only("pk")):
        # Read job by job: points have no column for the organization, and their index begins with the job.
        for values in _iterate_values(MetricPoint.objects.filter(job=job), columns):
            yield csv_row(map(_cell, values))


def _table(rows: QuerySet[Any], **columns: str) -> Iterator[str]:
    """Yield CSV. Each keyword is the title of a column, its value the field or lookup that fills the column."""
    yield csv_row(columns)
    for values in _iterate_values(rows, tuple(columns.values())):
        yield csv_row(map(_cell, values))


def _iterate_values(rows: QuerySet[Any], fields: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the values of these fields of all rows, by primary key, in batches."""
    # The primary key is read too, because the next batch begins after it.
    for values in _iterate_in_batches(rows.values_list("pk", *fields), lambda row: row[0]):
        yield values[1:]


def _iterate(rows: QuerySet[Any]) -> Iterator[Any]:
    """Yield all rows by primary key. No database cursor stays open between two batches, while the archive is sent."""
    return _iterate_in_batches(rows, lambda row: row.pk)


def _iterate_in_batches(rows: QuerySet[Any], pk_of: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield all rows by primary key, BATCH_SIZE at a time. `pk_of` returns the primary key of a row."""
    rows, last_pk = rows.order_by("pk"), None
    while True:
        batch = list((rows if last_pk is None else rows.filter(pk__gt=last_pk))[:BATCH_SIZE])
        yield from batch
        if len(batch) < BATCH_SIZE:
            return
        last_pk = pk_of(batch[-1])


def _cell(value: object) -> str:
    """Return a value as a cell of CSV. Texts are escaped, so that no spreadsheet executes them as formulas."""
    if value is None:
        return ""
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, dict | list):
        return _json(value, indent=None)
    return escape_formula(value) if isinstance(value, str) else str(value)


def _json(value: object, indent: int | None = 2) -> str:
    # `default` is called only for types that JSON does not have, such as dates and decimal numbers.
    return json.dumps(value, ensure_ascii=False, indent=indent, default=_cell)
