"""Secrets of organizations: values that runs get as environment variables.

They are stored encrypted, and neither pages nor the API show a value. An order names the secrets that its job needs.
Each attempt of the job gets the values as they are when the attempt starts.
"""

from __future__ import annotations

from collections.abc import Collection

from django.db import transaction
from django.db.models import QuerySet
from django.utils.translation import gettext_lazy as _
from django.views.decorators.debug import sensitive_variables

from console.accounts.models import Organization, User
from console.accounts.services import record_audit_event
from console.core import encryption
from console.core.errors import InvalidInput, NotFound
from runtime import environment
from storage import in_use, quota
from storage.errors import SecretUnreadable
from storage.in_use import ObjectIds
from storage.models import Secret

ENCRYPTION_PURPOSE = b"trainyard secrets"
"""The key that encrypts values is derived from this purpose (`console.core.encryption`). If it changes, stored values
can no longer be decrypted."""
MAX_SECRETS = 100
"""How many secrets an organization may have, far more than people can tell apart by name."""


def secrets_for(organization: Organization) -> QuerySet[Secret]:
    """Return the organization's secrets, sorted by name."""
    return Secret.objects.filter(organization=organization).order_by("name")


def secret_named(organization: Organization, name: str) -> Secret:
    """Return the organization's secret with this name. Raises NotFound."""
    secret = secrets_for(organization).filter(name=name).first() if environment.is_name(name) else None
    if secret is None:
        raise NotFound
    return secret


@sensitive_variables("value")
def save_secret(*, organization: Organization, name: str, value: str, user: User | None = None) -> tuple[Secret, bool]:
    """Create a secret, or replace its value. Return the secret, and whether it is new. Raises InvalidInput.

    An open job gets the new value at its next attempt.
    """
    if not environment.is_name(name):
        sentence = _("Use up to 100 letters, digits and underscores. Do not start with a digit.")
        raise InvalidInput(fields={"name": sentence})
    if environment.is_reserved(name):
        raise InvalidInput(fields={"name": _("The platform sets this variable itself. Choose another name.")})
    size = len(value.encode("utf-8", "surrogatepass"))  # lone surrogates must not raise here; `_is_utf8` refuses them
    if not value or "\0" in value or size > environment.MAX_SECRET_BYTES or not _is_utf8(value):
        sentence = _("The value must have 1 to %(most)d bytes of text without NUL characters.")
        raise InvalidInput(fields={"value": sentence % {"most": environment.MAX_SECRET_BYTES}})
    with transaction.atomic():
        quota.lock(organization)  # concurrent calls wait here, so they cannot exceed MAX_SECRETS together
        others = secrets_for(organization).exclude(name=name)
        if others.count() >= MAX_SECRETS:
            sentence = _("Your organization has reached its limit of %(most)d secrets. Delete one first.")
            raise InvalidInput(fields={"name": sentence % {"most": MAX_SECRETS}})
        secret, created = Secret.objects.update_or_create(
            organization=organization,
            name=name,
            defaults={"encrypted": encryption.encrypt(value, purpose=ENCRYPTION_PURPOSE), "updated_by": user},
        )
        record_audit_event(
            organization=organization,
            actor=user,
            action="secret.created" if created else "secret.changed",
            target=name,
        )
    return secret, created


def delete_secret(*, secret: Secret, user: User | None = None) -> None:
    """Delete a secret. Raises InUse while an open job needs it."""
    organization = secret.organization
    with transaction.atomic():
        quota.lock(organization)  # orders lock it too, so they wait for this deletion
        in_use.require_unused(ObjectIds(secrets=[secret.pk]), viewer_organization_id=organization.pk)
        if Secret.objects.filter(pk=secret.pk).delete()[0]:
            record_audit_event(organization=organization, actor=user, action="secret.deleted", target=secret.name)


def missing(organization: Organization, names: Collection[str]) -> list[str]:
    """Return the `names` of which the organization has no secret."""
    possible = [name for name in names if environment.is_name(name)]
    rows = secrets_for(organization).filter(name__in=possible)
    existing = set(rows.values_list("name", flat=True)) if possible else set()
    return [name for name in names if name not in existing]


@sensitive_variables()
def values_of(organization: Organization, names: Collection[str]) -> dict[str, str]:
    """Return the values of these secrets by name. Raises SecretUnreadable, also if a secret does not exist."""
    values = {}
    for secret in secrets_for(organization).filter(name__in=names):
        value = encryption.decrypt(secret.encrypted, purpose=ENCRYPTION_PURPOSE)
        if value is not None:
            values[secret.name] = value
    if unreadable := [name for name in names if name not in values]:
        raise SecretUnreadable(
            _("The secret %(name)s can't be decrypted any more. Set its value again.") % {"name": unreadable[0]}
        )
    return values


def _is_utf8(text: str) -> bool:
    """Return whether UTF-8 can encode a text, which lone surrogates from JSON prevent."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
