"""Service accounts: members of an organization that are programs. They act with API tokens and never log in.

Owners create them. Their role is never owner, so they cannot manage members. Deleting one keeps the row of its user,
to which the audit log refers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from console.accounts import selectors, services
from console.accounts.models import ApiToken, Membership, Organization, ServiceAccount, User
from console.accounts.roles import Role
from console.core.errors import InvalidInput

ROLES = (Role.MEMBER, Role.BILLING, Role.VIEWER)
"""The roles that a service account may have."""
MAX_PER_ORGANIZATION = 100
"""Largest number of service accounts of an organization; leaves room for one per pipeline of a large team."""
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
"""A valid name, which becomes part of an e-mail address; 40 is the length of its database column."""


def create(*, actor: Membership, name: str, role: str) -> ServiceAccount:
    """Create a service account. Raises InvalidInput."""
    organization = actor.organization
    if not _NAME.fullmatch(name):
        message = _("Use 1 to 40 small letters, digits and dashes, and begin and end with a letter or digit.")
        raise InvalidInput(fields={"name": message})
    role = _checked_role(actor, role)
    with transaction.atomic():
        services.lock(organization)
        accounts = selectors.service_accounts(organization=organization)
        if accounts.filter(name=name).exists():
            raise InvalidInput(fields={"name": _("This name is taken. Choose another one.")})
        if accounts.count() >= MAX_PER_ORGANIZATION:
            message = _("There are %(most)d service accounts already.")
            raise InvalidInput(fields={"name": message % {"most": MAX_PER_ORGANIZATION}})
        user = _create_user(organization, name)
        membership = Membership.objects.create(user=user, organization=organization, role=role)
        account = ServiceAccount.objects.create(membership=membership, name=name, created_by=actor.user)
        _record(account, actor, "created", role=role)
    return account


def change_role(*, account: ServiceAccount, actor: Membership, role: str) -> None:
    """Change the role. Tokens keep scopes that the new role does not allow, without effect. Raises InvalidInput."""
    role = _checked_role(actor, role)
    with transaction.atomic():
        services.lock(actor.organization)
        account.membership.refresh_from_db(fields=["role"])
        if account.membership.role != role:
            account.membership.role = role
            account.membership.save(update_fields=["role"])
            _record(account, actor, "role_changed", to=role)


def set_disabled(*, account: ServiceAccount, actor: Membership, is_disabled: bool) -> None:
    """Stop all tokens of the account, or let them work again. Idempotent."""
    with transaction.atomic():
        rows = ServiceAccount.objects.filter(pk=account.pk, disabled_at__isnull=is_disabled)
        if rows.update(disabled_at=timezone.now() if is_disabled else None):
            _record(account, actor, "disabled" if is_disabled else "enabled")


def delete(*, account: ServiceAccount, actor: Membership) -> None:
    """Delete the account with its tokens. Runs that it ordered continue. Idempotent."""
    with transaction.atomic():
        services.lock(actor.organization)
        membership = Membership.objects.filter(pk=account.membership_id).select_related("user").first()
        if membership is None:
            return
        _record(account, actor, "deleted")
        user = membership.user
        membership.delete()
        user.email = f"{account.name}.deleted-{user.pk}@{user.email.partition('@')[2]}"  # frees the name
        user.save(update_fields=["email"])


def create_token(
    *,
    account: ServiceAccount,
    actor: Membership,
    name: str,
    scopes: Iterable[str] | None = None,
    days: int | None = None,
    creating_token: ApiToken | None = None,
) -> tuple[ApiToken, str]:
    """Create a token of the account and return it with its secret. Raises InvalidInput.

    The new token never exceeds the actor's own scopes: an actor who uses a token without `pay` cannot create one with
    `pay`.
    """
    membership = account.membership
    membership.scopes = actor.scopes  # not a column: what `create_token` may give
    try:
        return services.create_token(
            membership=membership, name=name, scopes=scopes, days=days, creating_token=creating_token, actor=actor.user
        )
    finally:
        membership.scopes = None


def _create_user(organization: Organization, name: str) -> User:
    """Create the account's user: inactive and without a password. Raises InvalidInput if the name is taken.

    The reserved domain `.invalid` receives no email (RFC 2606).
    """
    address = f"{name}@{organization.slug}.service.invalid"
    if User.objects.filter(email=address).exists():  # left if an administrator removed the membership in `/admin/`
        raise InvalidInput(fields={"name": _("This name is taken. Choose another one.")})
    return User.objects.create_user(address, None, is_active=False)


def _checked_role(actor: Membership, role: str) -> Role:
    """Return the role if service accounts may have it and the actor may give it. Raises InvalidInput."""
    if role not in ROLES:
        raise InvalidInput(fields={"role": _("Choose one of: member, billing, viewer.")})
    if not actor.may_grant(role):
        raise InvalidInput(fields={"role": _("Choose a role that the token that you use allows.")})
    return Role(role)


def _record(account: ServiceAccount, actor: Membership, verb: str, **data: str) -> None:
    """Write an entry of the audit log; `verb` is a past participle such as "created"."""
    services.record_audit_event(
        organization=actor.organization,
        actor=actor.user,
        action=f"service_account.{verb}",
        target=account.name,
        data=data,
    )
