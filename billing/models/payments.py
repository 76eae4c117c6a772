"""Money that comes in and goes back: what customers pay, what administrators give, what the payment provider said.

One rule: the row is written before the payment provider is called, and its id is the key there.
"""

from __future__ import annotations

import uuid
from typing import Any

from django.conf import settings
from django.core.validators import MinValueValidator
from django.db import models
from django.utils.translation import gettext_lazy as _

from billing.models.ledger import Account
from console.accounts.models import Organization


class TopUp(models.Model):
    """Money a customer pays in. The row is written before the payment provider is called; its id is the key there."""

    class States(models.TextChoices):
        """The life of a top-up."""

        CREATED = "created", _("not yet at the payment page")
        PENDING = "pending", _("waiting for payment")
        PAID = "paid", _("paid")
        EXPIRED = "expired", _("expired")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    account = models.ForeignKey(Account, models.PROTECT, related_name="top_ups")
    amount_minor = models.PositiveBigIntegerField(validators=[MinValueValidator(1)])
    currency = models.CharField(max_length=3)
    state = models.CharField(max_length=8, choices=States.choices, default=States.CREATED)
    session_id = models.CharField(max_length=255, blank=True)
    checkout_url = models.TextField(blank=True)
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)
    paid_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name = _("top-up")
        verbose_name_plural = _("top-ups")
        ordering = ("-created_at",)

    def __str__(self) -> str:
        return str(self.id)


class CreditGrant(models.Model):
    """Money an administrator gave, with the reason. Its transaction is `grant:<id>`."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    organization = models.ForeignKey(Organization, models.PROTECT, related_name="credit_grants")
    amount_minor = models.PositiveBigIntegerField(_("amount (minor units)"), validators=[MinValueValidator(1)])
    reason = models.CharField(_("reason"), max_length=255)
    granted_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", editable=False
    )
    created_at = models.DateTimeField(_("when"), auto_now_add=True)

    class Meta:
        verbose_name = _("credit grant")
        verbose_name_plural = _("credit grants")
        ordering = ("-created_at",)

    def __str__(self) -> str:
        return f"{self.organization} {self.amount_minor}"


class StripeEvent(models.Model):
    """A webhook as it came, stored before it is acted on.

    Keyed on the provider's event id, which is never acted on twice.
    """

    class States(models.TextChoices):
        """The life of an event."""

        RECEIVED = "received", _("received")
        APPLIED = "applied", _("applied")
        IGNORED = "ignored", _("nothing to do")
        QUARANTINED = "quarantined", _("quarantined")

    event_id = models.CharField(_("event"), max_length=255, unique=True)
    type = models.CharField(_("type"), max_length=100)
    payload: models.JSONField[dict[str, Any]] = models.JSONField()
    state = models.CharField(_("state"), max_length=12, choices=States.choices, default=States.RECEIVED)
    reason = models.TextField(_("reason"), blank=True)
    received_at = models.DateTimeField(_("received"), auto_now_add=True)
    applied_at = models.DateTimeField(_("applied"), null=True, blank=True)

    class Meta:
        verbose_name = _("payment event")
        verbose_name_plural = _("payment events")
        ordering = ("-id",)

    def __str__(self) -> str:
        return self.event_id
