"""Publish notifications, and manage members' choices of mails and webhooks."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _

from console.accounts.models import Membership, Organization, User
from console.accounts.services import lock, record_audit_event
from console.core import encryption
from console.core.errors import InvalidInput, NotFound
from console.notifications.kinds import KINDS
from console.notifications.models import Choices, Delivery, Notification, Webhook

ENCRYPTION_PURPOSE = b"trainyard webhooks"
"""The key that encrypts webhooks' signing keys is derived from this purpose (`console.core.encryption`). If it changes,
stored signing keys can no longer be decrypted."""
MAX_URL_LENGTH = 500
"""The length of the database column of a webhook's URL."""
MAX_WEBHOOKS = 10
"""How many webhooks an organization may have: enough for a team's tools, and few enough to deliver to all in time."""


def publish(
    *, organization: Organization | int, kind: str, data: Mapping[str, Any], user: User | int | None = None
) -> None:
    """Write a notification in the caller's transaction. Emails and webhooks are sent within seconds after its commit.

    Pages show it to every member who may see the kind. For kinds about a run, sweep or notebook, `user` is who ordered
    it and gets the email. For all other kinds it is None, and the modules that send their emails choose the recipients.
    """
    Notification.objects.create(
        organization_id=getattr(organization, "pk", organization),
        kind=kind,
        data=dict(data),
        user_id=getattr(user, "pk", user),
    )


def visible(membership: Membership) -> QuerySet[Notification]:
    """Return the notifications that a member may see, newest first."""
    kinds = [name for name, kind in KINDS.items() if membership.allows(kind.needs)]
    return Notification.objects.filter(organization=membership.organization, kind__in=kinds)


def choices_of(membership: Membership) -> dict[str, bool]:
    """Return, for each kind that the member may see, whether the member gets emails of it."""
    chosen = Choices.objects.filter(membership=membership).values_list("mailed", flat=True).first() or {}
    return {name: chosen.get(name, kind.is_mailed) for name, kind in KINDS.items() if membership.allows(kind.needs)}


def choose_mails(*, membership: Membership, mailed: Collection[str]) -> None:
    """Store that the member gets emails of the kinds in `mailed`, and of no others."""
    choices = {name: name in mailed for name in KINDS}
    Choices.objects.update_or_create(membership=membership, defaults={"mailed": choices})


def wants_mail(membership: Membership, kind: str) -> bool:
    """Return whether a member gets emails of a kind."""
    return choices_of(membership).get(kind, False)


def webhooks_of(organization: Organization) -> QuerySet[Webhook]:
    """Return the organization's webhooks."""
    return Webhook.objects.filter(organization=organization)


def webhook_for(organization: Organization, pk: int) -> Webhook:
    """Return the organization's webhook with this id. Raises NotFound."""
    webhook = webhooks_of(organization).filter(pk=pk).first()
    if webhook is None:
        raise NotFound
    return webhook


def create_webhook(*, membership: Membership, url: str, kinds: Collection[str] = ()) -> tuple[Webhook, str]:
    """Create a webhook for these kinds, or for all if `kinds` is empty. Raises InvalidInput.

    Return it with its signing key, which is stored encrypted and never shown again.
    """
    _check_url(url)
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise InvalidInput(fields={"kinds": _("There is no kind %(kind)s.") % {"kind": unknown[0][:40]}})
    secret = f"whsec_{secrets.token_urlsafe(32)}"
    organization = membership.organization
    with transaction.atomic():
        lock(organization)
        if webhooks_of(organization).count() >= MAX_WEBHOOKS:
            raise InvalidInput(fields={"url": _("There are %(most)d webhooks already.") % {"most": MAX_WEBHOOKS}})
        webhook = Webhook.objects.create(
            organization=organization,
            url=url,
            kinds=sorted(kinds),
            secret=encryption.encrypt(secret, purpose=ENCRYPTION_PURPOSE),
            created_by=membership.user,
        )
        record_audit_event(organization=organization, actor=membership.user, action="webhook.created", target=url)
    return webhook, secret


def delete_webhook(*, webhook: Webhook, user: User) -> None:
    """Delete a webhook and the log of its deliveries."""
    with transaction.atomic():
        record_audit_event(organization=webhook.organization, actor=user, action="webhook.deleted", target=webhook.url)
        webhook.delete()


def redeliver(*, webhook: Webhook, delivery_pk: int) -> None:
    """Make a delivery due now, and allow all retries again. Raises NotFound."""
    updated_rows = Delivery.objects.filter(webhook=webhook, pk=delivery_pk).update(
        state=Delivery.States.DUE, tries=0, due_at=timezone.now(), error=""
    )
    if not updated_rows:
        raise NotFound


def _check_url(url: str) -> None:
    """Raise InvalidInput unless the URL has an allowed scheme and a host, but no credentials and no fragment."""
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        has_host = False
    has_valid_characters = url.isascii() and " " not in url
    is_valid = has_host and has_valid_characters and len(url) <= MAX_URL_LENGTH
    # Tools in the operator's network, which the setting allows, may use plain HTTP (docs/operator-guide/settings.md).
    schemes = {"https", "http"} if settings.WEBHOOK_PRIVATE_ADDRESSES else {"https"}
    if not is_valid or parts.scheme not in schemes or "@" in parts.netloc or parts.fragment:
        raise InvalidInput(fields={"url": _("Enter an address that begins with https:// and names a host.")})
