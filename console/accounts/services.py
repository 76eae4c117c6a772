"""Every change to accounts: organizations, members, the service's activation, API tokens, and the audit trail.

The one rule: whoever calls has checked that the actor may; what no one may do (leave an organization without an owner,
use a service without its terms) is refused here.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils import timezone
from django.utils.text import slugify
from django.utils.translation import gettext_lazy as _

from console.accounts import selectors
from console.accounts.errors import InvalidInput, LastOwner, NotAllowed, ServiceInactive, TermsNotAccepted
from console.accounts.models import (
    DISTRIBUTED_TRAINING,
    ApiToken,
    AuditEvent,
    Membership,
    Organization,
    Quota,
    ServiceActivation,
    User,
)
from console.accounts.roles import Capability, Role
from console.operations.kept import Kept, given

TOKEN_MARK = "ty_"  # noqa: S105  # how a token begins, not a token
TOKEN_BYTES = 30
"""240 random bits: 40 characters of URL-safe base64."""
NAME_LIMIT = 100
SLUG_TRIES = 20


# --- Organizations and members ----------------------------------------------------------------------------------------


def create_organization(*, user: User, name: str) -> Membership:
    """Make an organization with its quota; the user becomes its owner. Raises InvalidInput."""
    name = _checked_name(name)
    with transaction.atomic():
        organization = _insert_organization(name)
        Quota.objects.create(organization=organization)
        membership = Membership.objects.create(user=user, organization=organization, role=Role.OWNER)
        record(organization=organization, actor=user, action="organization.created", target=organization.slug)
    return membership


def rename_organization(*, organization: Organization, name: str, actor: User) -> Organization:
    """Change the display name; the short name stays, since addresses may hold it. Raises InvalidInput."""
    before, organization.name = organization.name, _checked_name(name)
    with transaction.atomic():
        organization.save(update_fields=["name"])
        data = {"from": before, "to": organization.name}
        record(organization=organization, actor=actor, action="organization.renamed", data=data)
    return organization


def add_member(*, organization: Organization, email: str, role: str, actor: User) -> Membership:
    """Add a person who has signed up, by e-mail address. Raises InvalidInput."""
    role = _checked_role(role)
    user = User.objects.filter(email=email.strip().lower(), is_active=True).first()
    if user is None:
        sentence = _("Nobody has signed up with this address yet. Ask the person to sign up first.")
        raise InvalidInput(fields={"email": sentence})
    with transaction.atomic():
        membership, made = Membership.objects.get_or_create(
            user=user, organization=organization, defaults={"role": role}
        )
        if not made:
            raise InvalidInput(fields={"email": _("This person is a member already.")})
        record(organization=organization, actor=actor, action="member.added", target=user.email, data={"role": role})
    return membership


def change_role(*, membership: Membership, role: str, actor: User | None) -> Membership:
    """Give a member another role. Raises InvalidInput, LastOwner."""
    role = _checked_role(role)
    with transaction.atomic():
        _lock(membership.organization)
        membership.refresh_from_db(fields=["role"])
        if membership.role == role:
            return membership
        if membership.role == Role.OWNER:
            _require_another_owner(membership)
        data = {"from": membership.role, "to": role}
        membership.role = role
        membership.save(update_fields=["role"])
        record(
            organization=membership.organization,
            actor=actor,
            action="member.role_changed",
            target=membership.user.email,
            data=data,
        )
    return membership


def remove_member(*, membership: Membership, actor: User | None) -> None:
    """End a membership; its API tokens end with it. Safe to repeat. Raises LastOwner."""
    with transaction.atomic():
        _lock(membership.organization)
        current = Membership.objects.filter(pk=membership.pk).first()
        if current is None:
            return
        if current.role == Role.OWNER:
            _require_another_owner(current)
        current.delete()
        record(organization=membership.organization, actor=actor, action="member.removed", target=membership.user.email)


# --- The service ------------------------------------------------------------------------------------------------------


def activate_service(*, membership: Membership, accept_terms: bool) -> ServiceActivation:
    """Take up distributed training for the organization. Safe to repeat. Raises TermsNotAccepted, NotAllowed.

    Writes the activation alone: the wallet and the first workspace are made by the rooms above that own them.
    """
    _require(membership, Capability.MANAGE)
    if not accept_terms:
        raise TermsNotAccepted(fields={"accept_terms": TermsNotAccepted.message})
    organization = membership.organization
    with transaction.atomic():
        _lock(organization)
        activation = selectors.activation(organization=organization)
        if activation is None:
            activation = ServiceActivation(organization=organization, service=DISTRIBUTED_TRAINING)
        elif activation.is_active and activation.terms_version == settings.TERMS_VERSION:
            return activation
        activation.terms_version = settings.TERMS_VERSION
        activation.activated_by = membership.user
        activation.activated_at = timezone.now()
        activation.deactivated_at = None
        activation.save()
        data = {"terms_version": settings.TERMS_VERSION}
        record(
            organization=organization,
            actor=membership.user,
            action="service.activated",
            target=DISTRIBUTED_TRAINING,
            data=data,
        )
    return activation


def deactivate_service(*, membership: Membership) -> ServiceActivation | None:
    """Stop new orders; what runs goes on. Safe to repeat. None when it never was active. Raises NotAllowed."""
    _require(membership, Capability.MANAGE)
    return suspend_service(organization=membership.organization, actor=membership.user)


def suspend_service(*, organization: Organization, actor: User | None) -> ServiceActivation | None:
    """The same by an administrator, who is no member."""
    with transaction.atomic():
        _lock(organization)
        activation = selectors.activation(organization=organization)
        if activation is None or not activation.is_active:
            return activation
        activation.deactivated_at = timezone.now()
        activation.save(update_fields=["deactivated_at"])
        record(organization=organization, actor=actor, action="service.deactivated", target=DISTRIBUTED_TRAINING)
    return activation


_ACTIVE = Kept(
    lambda: ServiceActivation.objects.filter(
        organization=given("organization"), service=DISTRIBUTED_TRAINING, deactivated_at=None
    )
)


def is_active(organization: Organization) -> bool:
    """Whether the organization may order distributed training."""
    return _ACTIVE.exists(organization=organization)


def require_active(*, organization: Organization) -> None:
    """Raise ServiceInactive unless the service is active."""
    if not is_active(organization):
        raise ServiceInactive


# --- API tokens -------------------------------------------------------------------------------------------------------


def create_token(*, membership: Membership, name: str) -> tuple[ApiToken, str]:
    """A token that acts for this member, and its secret, which can't be read again. Raises InvalidInput."""
    name = _checked_name(name)
    secret = TOKEN_MARK + secrets.token_urlsafe(TOKEN_BYTES)
    with transaction.atomic():
        token = ApiToken.objects.create(
            membership=membership, name=name, prefix=secret[:8], digest=token_digest(secret)
        )
        record(organization=membership.organization, actor=membership.user, action="token.created", target=str(token))
    return token, secret


def revoke_token(*, token: ApiToken, actor: User | None) -> None:
    """End a token at once. Safe to repeat."""
    with transaction.atomic():
        if ApiToken.objects.filter(pk=token.pk, revoked_at=None).update(revoked_at=timezone.now()):
            organization = token.membership.organization
            record(organization=organization, actor=actor, action="token.revoked", target=str(token))


def token_digest(secret: str) -> str:
    """What is stored of a secret. It is random, so a plain SHA-256 can't be searched."""
    return hashlib.sha256(secret.encode()).hexdigest()


def remember_language(*, user: User, language: str | None) -> None:
    """Mail to this person is written in a language of `settings.LANGUAGES` from now on; another one changes nothing."""
    if language in dict(settings.LANGUAGES) and user.language != language:
        user.language = language
        user.save(update_fields=["language"])


# --- The trail --------------------------------------------------------------------------------------------------------


def record(
    *,
    organization: Organization | None,
    actor: User | None,
    action: str,
    target: str = "",
    data: Mapping[str, Any] | None = None,
) -> AuditEvent:
    """Write one act down, in the transaction of the act. `action` reads `noun.verb_in_the_past`."""
    return AuditEvent.objects.create(
        organization=organization, actor=actor, action=action, target=target[:128], data=dict(data or {})
    )


# --- Checks -----------------------------------------------------------------------------------------------------------


def _insert_organization(name: str) -> Organization:
    """Insert under the first free short name; the database says which is free, so two at once can't collide."""
    base = slugify(name)[:50].strip("-") or "organization"
    for number in range(1, SLUG_TRIES):
        slug = base if number == 1 else f"{base}-{number}" if number < SLUG_TRIES // 2 else _random_slug(base)
        try:
            with transaction.atomic():
                return Organization.objects.create(name=name, slug=slug)
        except IntegrityError:
            continue
    raise InvalidInput(fields={"name": _("This name is taken. Choose another one.")})


def _random_slug(base: str) -> str:
    return f"{base}-{secrets.token_hex(3)}"


def _lock(organization: Organization) -> None:
    """Let one change at a time through: two owners who demote each other at once must not both succeed."""
    Organization.objects.select_for_update().get(pk=organization.pk)


def _require_another_owner(membership: Membership) -> None:
    if selectors.owners_count(organization=membership.organization) < 2:
        raise LastOwner


def _require(membership: Membership, capability: Capability) -> None:
    if not membership.allows(capability):
        raise NotAllowed


def _checked_name(name: str) -> str:
    name = re.sub(r"\s+", " ", name).strip()
    if not name:
        raise InvalidInput(fields={"name": _("Give a name.")})
    if len(name) > NAME_LIMIT:
        raise InvalidInput(fields={"name": _("Use at most 100 characters.")})
    return name


def _checked_role(role: str) -> str:
    if role not in tuple(Role):
        raise InvalidInput(fields={"role": _("Choose owner, member, billing or viewer.")})
    return role
