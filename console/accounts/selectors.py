"""What may be read of accounts. The one rule: all is reached from a user or an organization that the caller holds."""

from __future__ import annotations

from typing import Any

from django.db.models import Case, IntegerField, QuerySet, Value, When

from console.accounts.models import (
    DISTRIBUTED_TRAINING,
    ApiToken,
    AuditEvent,
    Membership,
    Organization,
    ServiceActivation,
    User,
)
from console.accounts.roles import Role


def membership_of(*, user: User, preferred_organization_id: Any = None) -> Membership | None:
    """The user's membership in the preferred organization, else the first one, else None."""
    chosen = preferred_organization_id if isinstance(preferred_organization_id, int) else 0
    first = Case(When(organization_id=chosen, then=Value(0)), default=Value(1), output_field=IntegerField())
    return user.memberships.select_related("organization", "user").order_by(first, "id").first()


def memberships(*, user: User) -> QuerySet[Membership]:
    """All of a user's memberships, oldest first."""
    return user.memberships.select_related("organization", "user").order_by("id")


def members(*, organization: Organization) -> QuerySet[Membership]:
    """The members of an organization, oldest first."""
    return organization.memberships.select_related("user", "organization").order_by("id")


def owners_count(*, organization: Organization) -> int:
    """How many owners an organization has."""
    return organization.memberships.filter(role=Role.OWNER).count()


def tokens(*, membership: Membership) -> QuerySet[ApiToken]:
    """A member's own tokens that still work, newest first."""
    return membership.tokens.filter(revoked_at=None).order_by("-id")


def activation(*, organization: Organization, service: str = DISTRIBUTED_TRAINING) -> ServiceActivation | None:
    """The row of a service that was ever activated, active or not."""
    return organization.activations.select_related("activated_by").filter(service=service).first()


def audit_events(*, organization: Organization) -> QuerySet[AuditEvent]:
    """What was done in an organization, newest first."""
    return AuditEvent.objects.filter(organization=organization).select_related("actor").order_by("-id")
