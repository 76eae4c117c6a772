"""Every change to accounts: organizations, members, the service's activation, API tokens, and the audit log.

Callers check the actor's capability; only `activate_service` and `deactivate_service` check it themselves. The rules
for everyone are enforced here: an organization always has an owner, and a service is activated only after its terms
were accepted.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils import timezone
from django.utils.text import slugify
from django.utils.translation import gettext_lazy as _

from console.accounts import second_factors, selectors, zones
from console.accounts.models import (
    DISTRIBUTED_TRAINING,
    MAX_TARGET_LENGTH,
    ApiToken,
    AuditEvent,
    Closure,
    Membership,
    Organization,
    Quota,
    ServiceActivation,
    User,
)
from console.accounts.roles import Capability, Role
from console.core.errors import (
    InvalidInput,
    LastOwner,
    NotAllowed,
    OrganizationClosing,
    ServiceInactive,
    SoleOwner,
    TermsNotAccepted,
)
from console.installation.selectors import terms_version
from console.observability import context

TOKEN_PREFIX = "ty_"  # noqa: S105  # how a token begins, not a token
TOKEN_BYTES = 30
"""Token length: 240 random bits, 40 characters of URL-safe base64."""
MAX_TOKEN_DAYS = 3650
"""The longest life of a token that expires: ten years. For a longer life, create one that never expires."""
MAX_NAME_LENGTH = 100
"""The length of the database columns that hold names of organizations and tokens."""
MAX_SLUG_ATTEMPTS = 20
"""How many slugs are tried for a new organization: first numbered ones, then random ones of 24 bits."""


# --- Organizations and members ----------------------------------------------------------------------------------------


def create_organization(*, user: User, name: str) -> Membership:
    """Create an organization with its quotas; the user becomes its owner. Raises InvalidInput."""
    name = _checked_name(name)
    with transaction.atomic():
        organization = _insert_organization(name)
        Quota.objects.create(organization=organization)
        membership = Membership.objects.create(user=user, organization=organization, role=Role.OWNER)
        record_audit_event(
            organization=organization, actor=user, action="organization.created", target=organization.slug
        )
    return membership


def rename_organization(*, organization: Organization, name: str, actor: User) -> Organization:
    """Rename the organization. Its slug stays, because URLs may contain it. Raises InvalidInput."""
    previous_name = organization.name
    organization.name = _checked_name(name)
    with transaction.atomic():
        organization.save(update_fields=["name"])
        data = {"from": previous_name, "to": organization.name}
        record_audit_event(organization=organization, actor=actor, action="organization.renamed", data=data)
    return organization


def set_second_factor_required(*, organization: Organization, is_required: bool, actor: User) -> Organization:
    """Set whether all members need a second factor. Idempotent.

    Raises InvalidInput if the actor has no second factor: they would lock themselves out.
    """
    if is_required and not second_factors.is_protected(actor):
        message = _("Set up a second factor for your own account first, under Security.")
        raise InvalidInput(fields={"requires_second_factor": message})
    with transaction.atomic():
        lock(organization)
        organization.refresh_from_db(fields=["requires_second_factor"])
        if organization.requires_second_factor != is_required:
            organization.requires_second_factor = is_required
            organization.save(update_fields=["requires_second_factor"])
            action = "organization.second_factor_" + ("required" if is_required else "optional")
            record_audit_event(organization=organization, actor=actor, action=action)
    return organization


def set_shells_enabled(*, organization: Organization, is_enabled: bool, actor: User) -> Organization:
    """Set whether members may open shells in nodes. Idempotent. Open shells end at their next check."""
    with transaction.atomic():
        lock(organization)
        organization.refresh_from_db(fields=["shell_enabled"])
        if organization.shell_enabled != is_enabled:
            organization.shell_enabled = is_enabled
            organization.save(update_fields=["shell_enabled"])
            action = "organization.shells_" + ("enabled" if is_enabled else "disabled")
            record_audit_event(organization=organization, actor=actor, action=action)
    return organization


def change_role(*, membership: Membership, role: str, actor: User | None) -> Membership:
    """Change a member's role. Raises InvalidInput, LastOwner."""
    role = checked_role(role)
    with transaction.atomic():
        lock(membership.organization)
        membership.refresh_from_db(fields=["role"])
        if membership.role == role:
            return membership
        if membership.role == Role.OWNER:
            _require_another_owner(membership)
        data = {"from": membership.role, "to": role}
        membership.role = role
        membership.save(update_fields=["role"])
        record_audit_event(
            organization=membership.organization,
            actor=actor,
            action="member.role_changed",
            target=membership.user.email,
            data=data,
        )
    return membership


def remove_member(*, membership: Membership, actor: User | None) -> None:
    """Remove a member and revoke their API tokens. Idempotent. Raises LastOwner."""
    with transaction.atomic():
        lock(membership.organization)
        current = Membership.objects.filter(pk=membership.pk).first()
        if current is None:
            return
        if current.role == Role.OWNER:
            _require_another_owner(current)
        current.delete()  # with the member's tokens
        record_audit_event(
            organization=membership.organization, actor=actor, action="member.removed", target=membership.user.email
        )


# --- The service ------------------------------------------------------------------------------------------------------


def activate_service(*, membership: Membership, accept_terms: bool) -> ServiceActivation:
    """Activate distributed training for the organization. Idempotent.

    Raises TermsNotAccepted, NotAllowed, OrganizationClosing. Writes only the activation: `jobs.activation` creates the
    wallet and the first workspace.
    """
    _require_capability(membership, Capability.MANAGE)
    if not accept_terms:
        raise TermsNotAccepted(fields={"accept_terms": TermsNotAccepted.message})
    organization = membership.organization
    version = terms_version()
    with transaction.atomic():
        lock(organization)
        require_open(organization=organization)
        activation = selectors.activation(organization=organization)
        if activation is None:
            activation = ServiceActivation(organization=organization, service=DISTRIBUTED_TRAINING)
        elif activation.is_active and activation.terms_version == version:
            return activation
        activation.terms_version = version
        activation.activated_by = membership.user
        activation.activated_at = timezone.now()
        activation.deactivated_at = None
        activation.save()
        data = {"terms_version": version}
        record_audit_event(
            organization=organization,
            actor=membership.user,
            action="service.activated",
            target=DISTRIBUTED_TRAINING,
            data=data,
        )
    return activation


def deactivate_service(*, membership: Membership) -> ServiceActivation | None:
    """Deactivate the service; running jobs continue. Idempotent. None if it never was active. Raises NotAllowed."""
    _require_capability(membership, Capability.MANAGE)
    return suspend_service(organization=membership.organization, actor=membership.user)


def suspend_service(*, organization: Organization, actor: User | None) -> ServiceActivation | None:
    """Deactivate the service without a check of a capability, because an administrator is no member."""
    with transaction.atomic():
        lock(organization)
        activation = selectors.activation(organization=organization)
        if activation is None or not activation.is_active:
            return activation
        activation.deactivated_at = timezone.now()
        activation.save(update_fields=["deactivated_at"])
        record_audit_event(
            organization=organization, actor=actor, action="service.deactivated", target=DISTRIBUTED_TRAINING
        )
    return activation


def is_active(organization: Organization) -> bool:
    """Return whether the organization may order distributed training."""
    return ServiceActivation.objects.filter(
        organization=organization, service=DISTRIBUTED_TRAINING, deactivated_at=None
    ).exists()


def require_active(*, organization: Organization) -> None:
    """Raise ServiceInactive unless the service is active."""
    if not is_active(organization):
        raise ServiceInactive


# --- Closure ----------------------------------------------------------------------------------------------------------


def require_open(*, organization: Organization) -> None:
    """Raise OrganizationClosing if the organization is being closed. See `jobs.closure`."""
    if Closure.objects.filter(organization=organization).exists():
        raise OrganizationClosing


def end_memberships(*, organization: Organization) -> None:
    """Remove all members with their tokens, and revoke open invitations: the organization was closed. Idempotent."""
    organization.invitations.filter(accepted_at=None, revoked_at=None).update(revoked_at=timezone.now())
    organization.memberships.all().delete()


def close_account(*, user: User) -> None:
    """Delete a person's account with memberships and tokens. The audit log keeps their address with their actions.

    Raises SoleOwner for administrators, and while an organization that is not being closed has no other owner.
    """
    if user.is_staff:
        raise SoleOwner(_("Administrators can't delete their own account. Ask another administrator."))
    with transaction.atomic():
        # Locked, so that two owners who delete their accounts at once cannot leave an organization without an owner.
        rows = Organization.objects.select_for_update(of=("self",), no_key=True)
        organizations = list(rows.filter(memberships__user=user).order_by("pk"))
        closing_ids = set(
            Closure.objects.filter(organization__in=organizations).values_list("organization_id", flat=True)
        )
        open_organizations = [organization for organization in organizations if organization.pk not in closing_ids]
        if solely_owned := [each.name for each in open_organizations if _is_only_owner(user, each)]:
            message = _("You are the only owner of %(names)s. Make another member an owner, or close it first.")
            raise SoleOwner(message % {"names": ", ".join(solely_owned)})
        for organization in organizations:
            record_audit_event(organization=organization, actor=user, action="account.closed", target=user.email)
        AuditEvent.objects.filter(actor=user).update(actor_email=user.email)
        user.delete()


def _is_only_owner(user: User, organization: Organization) -> bool:
    """Return whether a user is the only active owner of an organization."""
    owners = organization.memberships.filter(role=Role.OWNER)
    return owners.filter(user=user).exists() and not owners.exclude(user=user).filter(user__is_active=True).exists()


# --- API tokens -------------------------------------------------------------------------------------------------------


def create_token(
    *,
    membership: Membership,
    name: str,
    scopes: Iterable[str] | None = None,
    days: int | None = None,
    creating_token: ApiToken | None = None,
    actor: User | None = None,
) -> tuple[ApiToken, str]:
    """Create an API token and return it with its secret, which is not stored. Raises InvalidInput.

    `scopes` limits the token to these capabilities and `view`; None: all that the role allows. It expires after `days`.
    If the request itself uses a token (`creating_token`), the new token has at most its scopes, and expires no later.
    `actor` is the user who creates the token, if not the member.
    """
    name = _checked_name(name)
    limits = membership.scopes if scopes is None else _checked_scopes(membership, scopes)
    if days is not None and not 1 <= days <= MAX_TOKEN_DAYS:
        raise InvalidInput(fields={"days": _("Choose between 1 and 3650 days.")})
    expiries = [timezone.now() + timedelta(days=days)] if days else []
    if creating_token and creating_token.expires_at:
        expiries.append(creating_token.expires_at)
    secret = TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    with transaction.atomic():
        token = ApiToken.objects.create(
            membership=membership,
            name=name,
            prefix=secret[:8],  # "ty_" and five characters: enough to recognize it, too few to guess it
            digest=token_digest(secret),
            scopes=None if limits is None else sorted(limits),
            expires_at=min(expiries, default=None),
        )
        record_audit_event(
            organization=membership.organization,
            actor=actor or membership.user,
            action="token.created",
            target=str(token),
            data={"scopes": token.scopes, "expires_at": token.expires_at.isoformat() if token.expires_at else None},
        )
    return token, secret


def _checked_scopes(membership: Membership, scopes: Iterable[str]) -> set[str]:
    """Return the scopes and `view`, which every token has. Raises InvalidInput for a scope that the member lacks."""
    requested = {Capability.VIEW.value, *scopes}
    valid_scopes = {capability.value for capability in Capability}
    if not requested <= valid_scopes or not all(membership.allows(Capability(scope)) for scope in requested):
        raise InvalidInput(fields={"scopes": _("Choose scopes that your role, and the token that you use, allow.")})
    return requested


def revoke_token(*, token: ApiToken, actor: User | None) -> None:
    """Revoke a token. Idempotent."""
    with transaction.atomic():
        if ApiToken.objects.filter(pk=token.pk, revoked_at=None).update(revoked_at=timezone.now()):
            organization = token.membership.organization
            record_audit_event(organization=organization, actor=actor, action="token.revoked", target=str(token))


def token_digest(secret: str) -> str:
    """Return the stored digest of a secret. Secrets are random, so a plain SHA-256 suffices."""
    return hashlib.sha256(secret.encode()).hexdigest()


# --- Sign-up ----------------------------------------------------------------------------------------------------------


def may_sign_up(email: str) -> bool:
    """Return whether SIGNUP_EMAIL_DOMAINS allows people to sign up with this address."""
    domains = settings.SIGNUP_EMAIL_DOMAINS
    return not domains or email.rpartition("@")[2].lower() in domains


def request_approval(*, user: User) -> None:
    """If SIGNUP is `approval`, keep a new user from logging in until an administrator approves."""
    if settings.SIGNUP == "approval":
        user.awaits_approval = True
        user.save(update_fields=["awaits_approval"])
        record_audit_event(organization=None, actor=user, action="approval.requested", target=user.email)


def approve_user(*, user: User, actor: User | None) -> bool:
    """Let a user who awaits approval log in. Return False if the user did not await approval."""
    with transaction.atomic():
        if not User.objects.filter(pk=user.pk, awaits_approval=True).update(awaits_approval=False):
            return False
        record_audit_event(organization=None, actor=actor, action="approval.given", target=user.email)
    return True


# --- Language and time zone -------------------------------------------------------------------------------------------


def set_mail_language(*, user: User, language: str | None) -> None:
    """Set the language of emails to this person. Unknown languages are ignored."""
    if language in dict(settings.LANGUAGES) and user.language != language:
        user.language = language
        user.save(update_fields=["language"])


def choose_time_zone(*, user: User, name: str) -> None:
    """Set the person's time zone; empty: use the browser's. Raises InvalidInput."""
    if name and not zones.is_known(name):
        raise InvalidInput(fields={"time_zone": _("Choose a time zone from the list.")})
    user.time_zone = name
    user.save(update_fields=["time_zone"])


def store_browser_time_zone(*, user: User, name: str) -> None:
    """Store the browser's time zone; emails use it unless the person has chosen one. Unknown names are ignored."""
    if user.browser_time_zone != name and zones.is_known(name):
        user.browser_time_zone = name
        user.save(update_fields=["browser_time_zone"])


# --- The audit log ----------------------------------------------------------------------------------------------------


def record_audit_event(
    *,
    organization: Organization | None,
    actor: User | None,
    action: str,
    target: str = "",
    data: Mapping[str, Any] | None = None,
) -> AuditEvent:
    """Write an entry of the audit log in the caller's transaction. `action` has the form `noun.past_participle`.

    Within a request, the client's IP address is stored too.
    """
    return AuditEvent.objects.create(
        organization=organization,
        actor=actor,
        action=action,
        target=target[:MAX_TARGET_LENGTH],
        data=dict(data or {}),
        address=context.fields().get("client"),
    )


# --- Helpers ----------------------------------------------------------------------------------------------------------


def _insert_organization(name: str) -> Organization:
    """Insert an organization with the first free slug, made from its name. Raises InvalidInput.

    The slug's unique constraint decides which is free, so concurrent calls cannot choose the same.
    """
    base = slugify(name)[:50].strip("-") or "organization"  # a slug has 60 characters: the rest is for the number
    for number in range(1, MAX_SLUG_ATTEMPTS + 1):
        if number < MAX_SLUG_ATTEMPTS // 2:
            slug = base if number == 1 else f"{base}-{number}"
        else:
            slug = f"{base}-{secrets.token_hex(3)}"
        try:
            with transaction.atomic():
                return Organization.objects.create(name=name, slug=slug)
        except IntegrityError:
            continue
    raise InvalidInput(fields={"name": _("This name is taken. Choose another one.")})


def lock(organization: Organization) -> None:
    """Lock the organization's row for this transaction: two owners who demote each other must not both succeed.

    With `no_key`, other transactions can still insert rows that reference the organization. An insert that waited for
    this lock, in a transaction with a lock that the caller wants next, would be a deadlock.
    """
    Organization.objects.select_for_update(no_key=True).get(pk=organization.pk)


def _require_another_owner(membership: Membership) -> None:
    """Raise LastOwner if the organization of this owner has no other owner who can log in."""
    # `owners_count` counts this owner only if the user is active.
    others_count = selectors.owners_count(organization=membership.organization) - membership.user.is_active
    if others_count < 1:
        raise LastOwner


def _require_capability(membership: Membership, capability: Capability) -> None:
    """Raise NotAllowed if the member lacks the capability."""
    if not membership.allows(capability):
        raise NotAllowed


def _checked_name(name: str) -> str:
    """Return the name of an organization or token, with single spaces between its words. Raises InvalidInput."""
    name = re.sub(r"\s+", " ", name).strip()
    if not name:
        raise InvalidInput(fields={"name": _("Enter a name.")})
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidInput(fields={"name": _("Use at most 100 characters.")})
    return name


def checked_role(role: str) -> str:
    """Return `role` if it is valid. Raises InvalidInput."""
    if role not in tuple(Role):
        raise InvalidInput(fields={"role": _("Choose one of: owner, member, billing, viewer.")})
    return role
