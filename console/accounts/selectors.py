"""Read-only queries of accounts."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta

from allauth.account.models import EmailAddress
from django.db.models import Q, QuerySet
from django.utils import timezone

from console.accounts.models import (
    ACCOUNT_ACTION_PREFIX,
    DISTRIBUTED_TRAINING,
    ApiToken,
    AuditEvent,
    Invitation,
    Membership,
    Organization,
    ServiceAccount,
    ServiceActivation,
    User,
)
from console.accounts.roles import Role


def memberships(*, user: User) -> QuerySet[Membership]:
    """Return a user's memberships, oldest first."""
    return user.memberships.select_related("organization__closure").order_by("id")


def members(*, organization: Organization) -> QuerySet[Membership]:
    """Return the members of an organization, oldest first, without service accounts."""
    people = organization.memberships.filter(service_account=None)
    return people.select_related("user", "organization").order_by("id")


def service_accounts(*, organization: Organization) -> QuerySet[ServiceAccount]:
    """Return the service accounts of an organization by name."""
    accounts = ServiceAccount.objects.filter(membership__organization=organization)
    return accounts.select_related("membership__user", "membership__organization", "created_by").order_by("name")


def usable_memberships() -> QuerySet[Membership]:
    """Return the memberships that may act: of active people, and of service accounts that are not disabled."""
    # The user of a service account is never active.
    of_service_account = Q(service_account__isnull=False, service_account__disabled_at=None)
    return Membership.objects.filter(Q(user__is_active=True) | of_service_account)


def owners_count(*, organization: Organization) -> int:
    """Return the number of owners of an organization who can log in: an administrator may deactivate users."""
    return organization.memberships.filter(role=Role.OWNER, service_account=None, user__is_active=True).count()


def open_invitations(*, organization: Organization) -> QuerySet[Invitation]:
    """Return invitations that were not accepted, declined or revoked, newest first, including expired ones."""
    # Declining an invitation sets `revoked_at` too.
    invitations = organization.invitations.filter(accepted_at=None, revoked_at=None)
    return invitations.select_related("invited_by", "organization").order_by("-id")


def has_account(*, email: str) -> bool:
    """Return whether an address has an account. Reveal it only to the address's owner."""
    return User.objects.filter(email=email, is_active=True).exists()


def user_of_address(*, email: str) -> User | None:
    """Return the user who logs in with an address: who verified it, else whose main address it is, else who added it.

    The number of queries is the same for every address, so that the response time does not reveal who has an account.
    """
    address = (
        EmailAddress.objects.filter(email=email.lower()).select_related("user").order_by("-verified", "pk").first()
    )
    user = User.objects.filter(email=email.lower()).first()
    return address.user if address and (address.verified or user is None) else user


def valid_tokens() -> QuerySet[ApiToken]:
    """Return the tokens of every organization that were not revoked and have not expired."""
    return ApiToken.objects.filter(Q(expires_at=None) | Q(expires_at__gt=timezone.now()), revoked_at=None)


def tokens(*, membership: Membership) -> QuerySet[ApiToken]:
    """Return a member's tokens that were not revoked, newest first, including expired ones."""
    return membership.tokens.filter(revoked_at=None).order_by("-id")


def activation(*, organization: Organization, service: str = DISTRIBUTED_TRAINING) -> ServiceActivation | None:
    """Return the organization's activation of a service, also after deactivation; None if it was never activated."""
    return organization.activations.select_related("activated_by").filter(service=service).first()


def audit_events(*, organization: Organization) -> QuerySet[AuditEvent]:
    """Return the organization's audit log, newest first."""
    return AuditEvent.objects.filter(organization=organization).select_related("actor").order_by("-id")


def activity(*, organization: Organization) -> QuerySet[AuditEvent]:
    """Return what members did, newest first, without events of their own log-ins, which only owners may see."""
    return audit_events(organization=organization).exclude(action__startswith=ACCOUNT_ACTION_PREFIX)


def filtered_audit_events(
    *,
    organization: Organization,
    area: str = "",
    actor: int | None = None,
    address: str = "",
    since: date | None = None,
    until: date | None = None,
    before: int | None = None,
) -> QuerySet[AuditEvent]:
    """Return the audit log, newest first: actions of an area, of a user, from an IP address, between days (inclusive).

    `area` is the part of an action before its dot. The area `account`, of log-ins and second factors, also has
    `factors.reset`: an administrator removed a member's second factors. Days are those of the current time zone.
    `before`: only events with a smaller id.
    """
    events = audit_events(organization=organization)
    if area:
        is_in_area = Q(action__startswith=f"{area}.")
        if f"{area}." == ACCOUNT_ACTION_PREFIX:
            is_in_area |= Q(action="factors.reset")
        events = events.filter(is_in_area)
    if actor is not None:
        events = events.filter(actor=actor)
    if address:
        events = events.filter(address=address)
    if since:
        events = events.filter(created_at__gte=timezone.make_aware(datetime.combine(since, time.min)))
    if until and until < date.max:  # `date.max` has no next day, and excludes no event
        events = events.filter(
            created_at__lt=timezone.make_aware(datetime.combine(until + timedelta(days=1), time.min))
        )
    return events if before is None else events.filter(pk__lt=before)
