"""Money that comes in and goes back: what customers pay, what administrators give, what the payment provider said.

One rule: the row is written before the payment provider is called, and its id is the key there.
"""

from __future__ import annotations

import uuid
from typing import Any

from django.conf import settings
from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import F, Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from billing.models.ledger import Account
from billing.models.pricing import Quote
from console.accounts.models import Organization


class TopUp(models.Model):
    """Money a customer pays in. The row is written before the payment provider is called; its id is the key there."""

    class States(models.TextChoices):
        """The life of a top-up."""

        CREATED = "created", _("not yet at the payment page")
        PENDING = "pending", _("waiting for payment")
        PAID = "paid", _("paid")
        EXPIRED = "expired", _("expired")
        FAILED = "failed", _("failed")

    class Origins(models.TextChoices):
        """Who began it."""

        CHECKOUT = "checkout", _("payment page")
        AUTOMATIC = "automatic", _("automatic, from a saved card")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    account = models.ForeignKey(Account, models.PROTECT, related_name="top_ups")
    amount_minor = models.PositiveBigIntegerField(validators=[MinValueValidator(1)])
    currency = models.CharField(max_length=3)
    state = models.CharField(max_length=8, choices=States.choices, default=States.CREATED)
    origin = models.CharField(max_length=10, choices=Origins.choices, default=Origins.CHECKOUT)
    session_id = models.CharField(max_length=255, blank=True)
    method_id = models.CharField(max_length=255, blank=True, help_text=_("The saved card of an automatic top-up."))
    payment_intent = models.CharField(max_length=255, blank=True, db_index=True)
    checkout_url = models.TextField(blank=True)
    failure = models.CharField(max_length=100, blank=True, help_text=_("The provider's code for what went wrong."))
    quote = models.ForeignKey(
        Quote,
        models.SET_NULL,
        null=True,
        blank=True,
        related_name="top_ups",
        help_text=_("The offer that is bought with it, where it was paid for one."),
    )
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)
    paid_at = models.DateTimeField(null=True, blank=True)
    mailed_at = models.DateTimeField(null=True, blank=True, help_text=_("When its failure was told by mail."))

    class Meta:
        verbose_name = _("top-up")
        verbose_name_plural = _("top-ups")
        ordering = ("-created_at",)
        constraints = (
            models.UniqueConstraint(
                fields=["account"],
                condition=Q(origin="automatic", state__in=["created", "pending"]),
                name="one_automatic_top_up_at_a_time",
            ),
            models.UniqueConstraint(
                fields=["payment_intent"], condition=~Q(payment_intent=""), name="one_top_up_of_a_payment"
            ),
        )

    def __str__(self) -> str:
        return str(self.id)


class StripeEvent(models.Model):
    """A webhook as it came, stored before it is acted on.

    Keyed on the provider's event id, which is never acted on twice.
    """

    class States(models.TextChoices):
        """The life of an event."""

        RECEIVED = "received", _("received")
        APPLIED = "applied", _("applied")
        PARKED = "parked", _("parked: tried again later")
        IGNORED = "ignored", _("nothing to do")
        QUARANTINED = "quarantined", _("quarantined")

    event_id = models.CharField(_("event"), max_length=255, unique=True)
    type = models.CharField(_("type"), max_length=100)
    payload: models.JSONField[dict[str, Any]] = models.JSONField()
    state = models.CharField(_("state"), max_length=12, choices=States.choices, default=States.RECEIVED)
    reason = models.TextField(_("reason"), blank=True)
    received_at = models.DateTimeField(_("received"), auto_now_add=True)
    applied_at = models.DateTimeField(_("applied"), null=True, blank=True)
    tries = models.PositiveSmallIntegerField(_("tries"), default=0)
    retry_at = models.DateTimeField(_("next try"), null=True, blank=True)

    class Meta:
        verbose_name = _("payment event")
        verbose_name_plural = _("payment events")
        ordering = ("-id",)
        indexes = (
            models.Index(fields=["id"], condition=Q(state__in=["received", "parked"]), name="events_that_wait"),
            models.Index(fields=["id"], condition=Q(state="quarantined"), name="events_in_quarantine"),
        )

    def __str__(self) -> str:
        return self.event_id


class PaymentCustomer(models.Model):
    """An organization as the payment provider knows it, in one of the provider's worlds (sandbox, test, live)."""

    class Modes(models.TextChoices):
        """The provider's worlds; what exists in one is unknown in the others."""

        SANDBOX = "sandbox", _("sandbox")
        TEST = "test", _("test")
        LIVE = "live", _("live")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    organization = models.ForeignKey(Organization, models.CASCADE, related_name="payment_customers")
    mode = models.CharField(max_length=8, choices=Modes.choices)
    customer_id = models.CharField(max_length=255, blank=True)
    lost_id = models.CharField(
        max_length=255,
        blank=True,
        default="",
        db_default="",
        help_text=_("The record before, which was deleted at the payment provider."),
    )
    default_method = models.CharField(max_length=255, blank=True)

    class Meta:
        verbose_name = _("payment customer")
        verbose_name_plural = _("payment customers")
        constraints = (
            models.UniqueConstraint(fields=["organization", "mode"], name="one_payment_customer_per_organization"),
        )

    def __str__(self) -> str:
        return f"{self.organization} {self.customer_id}"


class AutoTopUp(models.Model):
    """A customer's standing order: when less than the threshold is available, pay the amount in from a saved card."""

    account = models.OneToOneField(Account, models.CASCADE, related_name="auto_top_up")
    is_on = models.BooleanField(_("on"), default=False)
    threshold_minor = models.PositiveBigIntegerField(_("threshold"), validators=[MinValueValidator(1)])
    amount_minor = models.PositiveBigIntegerField(_("amount"), validators=[MinValueValidator(1)])
    method_id = models.CharField(max_length=255)
    method_label = models.CharField(_("card"), max_length=100)
    failures = models.PositiveSmallIntegerField(_("failures in a row"), default=0)
    last_failure = models.CharField(_("last failure"), max_length=100, blank=True)
    retry_at = models.DateTimeField(_("next try"), null=True, blank=True)
    set_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    updated_at = models.DateTimeField(_("changed"), auto_now=True)
    mailed_at = models.DateTimeField(
        null=True, blank=True, editable=False, help_text=_("When it was told by mail that no card is left.")
    )

    class Meta:
        verbose_name = _("automatic top-up")
        verbose_name_plural = _("automatic top-ups")

    def __str__(self) -> str:
        return f"{self.account}: {self.amount_minor}"


class Refund(models.Model):
    """Money of a top-up that goes back the way it came. Its transaction is `refund:<id>`."""

    class States(models.TextChoices):
        """The life of a refund. Only a failed one gives the money back to the wallet."""

        CREATED = "created", _("not yet told to the provider")
        PENDING = "pending", _("on its way")
        SUCCEEDED = "succeeded", _("paid back")
        FAILED = "failed", _("failed")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    top_up = models.ForeignKey(TopUp, models.PROTECT, related_name="refunds", verbose_name=_("top-up"))
    amount_minor = models.PositiveBigIntegerField(_("amount (minor units)"), validators=[MinValueValidator(1)])
    reason = models.CharField(_("reason"), max_length=255)
    state = models.CharField(_("state"), max_length=9, choices=States.choices, default=States.CREATED)
    refund_id = models.CharField(max_length=255, null=True, blank=True, unique=True)  # unique, or none
    failure = models.CharField(_("failure"), max_length=100, blank=True)
    requested_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", editable=False
    )
    created_at = models.DateTimeField(_("when"), auto_now_add=True)
    ended_at = models.DateTimeField(_("ended"), null=True, blank=True)

    class Meta:
        verbose_name = _("refund")
        verbose_name_plural = _("refunds")
        ordering = ("-created_at",)

    def __str__(self) -> str:
        return str(self.id)


class Dispute(models.Model):
    """A payment that the cardholder's bank took back. What moved is in its `movements`."""

    class States(models.TextChoices):
        """The life of a dispute."""

        OPEN = "open", _("open")
        WON = "won", _("won")
        LOST = "lost", _("lost")

    dispute_id = models.CharField(_("dispute"), max_length=255, unique=True)
    top_up = models.ForeignKey(TopUp, models.PROTECT, related_name="disputes", verbose_name=_("top-up"))
    amount_minor = models.PositiveBigIntegerField(_("amount (minor units)"), validators=[MinValueValidator(1)])
    reason = models.CharField(_("reason"), max_length=100)
    state = models.CharField(_("state"), max_length=4, choices=States.choices, default=States.OPEN)
    is_withdrawn = models.BooleanField(_("funds withdrawn"), default=False)
    is_reinstated = models.BooleanField(_("funds given back"), default=False)
    withdrawn_minor = models.BigIntegerField(
        _("taken back now (minor units)"), null=True, help_text=_("The sum of what moved.")
    )
    """None until this version has looked at it; the two flags above are what the version before reads and writes."""
    evidence_due_at = models.DateTimeField(_("evidence due"), null=True, blank=True)
    opened_at = models.DateTimeField(_("opened"))
    ended_at = models.DateTimeField(_("ended"), null=True, blank=True)
    mailed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name = _("dispute")
        verbose_name_plural = _("disputes")
        ordering = ("-opened_at",)
        constraints = (
            models.CheckConstraint(
                condition=Q(is_withdrawn=True) | Q(is_reinstated=F("is_withdrawn")),
                name="only_what_was_withdrawn_is_reinstated",
            ),
        )

    def __str__(self) -> str:
        return self.dispute_id


class DisputeMovement(models.Model):
    """Money that a dispute moved: one balance transaction of the provider's, one transaction of ours."""

    dispute = models.ForeignKey(Dispute, models.PROTECT, related_name="movements", verbose_name=_("dispute"))
    balance_transaction = models.CharField(
        _("balance transaction"),
        max_length=255,
        null=True,
        blank=True,
        unique=True,  # or none: what was booked before ids were kept
    )
    reference = models.CharField(_("transaction"), max_length=100, unique=True)
    amount_minor = models.BigIntegerField(_("taken (minor units)"), help_text=_("Negative: given back."))
    moved_at = models.DateTimeField(_("when"), default=timezone.now)

    class Meta:
        verbose_name = _("movement of a dispute")
        verbose_name_plural = _("movements of disputes")
        ordering = ("id",)

    def __str__(self) -> str:
        return self.reference

    @property
    def is_unnamed(self) -> bool:
        """Whether it was booked before the provider's id was written down, and waits for it."""
        return self.balance_transaction is None
