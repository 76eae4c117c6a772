"""Top-ups, refunds, disputes and the payment provider's events.

The row of a top-up or refund is written before the provider is called. The row's id is the idempotency key of the call.
Newer columns have a `db_default`, because processes of the previous release write rows too during an upgrade.
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
    """A payment into the wallet."""

    class States(models.TextChoices):
        """The states of a top-up.

        CREATED: stored, but the provider has not yet answered the call that creates the payment page or the automatic
        charge.
        """

        CREATED = "created", _("payment page not yet created")
        PENDING = "pending", _("waiting for payment")
        PAID = "paid", _("paid")
        EXPIRED = "expired", _("expired")
        FAILED = "failed", _("failed")

    class Origins(models.TextChoices):
        """How the top-up was started."""

        CHECKOUT = "checkout", _("payment page")
        AUTOMATIC = "automatic", _("automatic, from a saved card")

    id = models.UUIDField("ID", primary_key=True, default=uuid.uuid4, editable=False)
    account = models.ForeignKey(Account, models.PROTECT, related_name="top_ups", verbose_name=_("account"))
    amount_minor = models.PositiveBigIntegerField(_("amount"), validators=[MinValueValidator(1)])
    currency = models.CharField(_("currency"), max_length=3)
    state = models.CharField(_("state"), max_length=8, choices=States.choices, default=States.CREATED)
    origin = models.CharField(_("origin"), max_length=10, choices=Origins.choices, default=Origins.CHECKOUT)
    session_id = models.CharField(_("checkout session"), max_length=255, blank=True)
    method_id = models.CharField(
        _("saved card"), max_length=255, blank=True, help_text=_("Saved card of an automatic top-up.")
    )
    payment_intent = models.CharField(_("payment intent"), max_length=255, blank=True, db_index=True)
    checkout_url = models.TextField(_("payment page"), blank=True)
    failure = models.CharField(
        _("failure"), max_length=100, blank=True, help_text=_("Failure code from the payment provider.")
    )
    quote = models.ForeignKey(
        Quote,
        models.SET_NULL,
        null=True,
        blank=True,
        related_name="top_ups",
        help_text=_("Quote that this top-up pays for, if any."),
        verbose_name=_("quote"),
    )
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", verbose_name=_("created by")
    )
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    paid_at = models.DateTimeField(_("paid at"), null=True, blank=True)
    mailed_at = models.DateTimeField(
        _("mailed"), null=True, blank=True, help_text=_("When the failure email was sent.")
    )

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
    """A webhook event, stored before it is applied. `event_id` is unique, so each event is stored and applied once."""

    class States(models.TextChoices):
        """The states of an event.

        QUARANTINED: it contradicts stored payments, so it is not retried. An administrator must decide.
        """

        RECEIVED = "received", _("received")
        APPLIED = "applied", _("applied")
        PARKED = "parked", _("parked: will be retried")
        IGNORED = "ignored", _("no action needed")
        QUARANTINED = "quarantined", _("quarantined")

    event_id = models.CharField(_("event"), max_length=255, unique=True)
    type = models.CharField(_("type"), max_length=100)
    payload: models.JSONField[dict[str, Any]] = models.JSONField(_("payload"))
    state = models.CharField(_("state"), max_length=12, choices=States.choices, default=States.RECEIVED)
    reason = models.TextField(_("reason"), blank=True)
    received_at = models.DateTimeField(_("received"), auto_now_add=True)
    applied_at = models.DateTimeField(_("applied"), null=True, blank=True)
    """When the event got a state that is not retried, also if it was ignored or quarantined."""
    tries = models.PositiveSmallIntegerField(_("attempt count"), default=0)
    retry_at = models.DateTimeField(_("next attempt"), null=True, blank=True)

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
    """An organization's customer object at the payment provider, in one mode (sandbox, test, live)."""

    class Modes(models.TextChoices):
        """The provider's modes. Objects of one mode do not exist in the others."""

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
        help_text=_("The previous record, deleted at the payment provider."),
    )
    """The last deleted customer. It changes the idempotency key of the call that creates the next one. With the old
    key, the provider would return the deleted customer again."""
    default_method = models.CharField(max_length=255, blank=True)
    """The provider's id of the default card. If there is no such card, the newest one is the default."""

    class Meta:
        verbose_name = _("payment customer")
        verbose_name_plural = _("payment customers")
        constraints = (
            models.UniqueConstraint(fields=["organization", "mode"], name="one_payment_customer_per_organization"),
        )

    def __str__(self) -> str:
        return f"{self.organization} {self.customer_id}"


class AutoTopUp(models.Model):
    """A wallet's settings for automatic top-ups: the threshold, the amount, and the saved card to charge."""

    account = models.OneToOneField(Account, models.CASCADE, related_name="auto_top_up", verbose_name=_("account"))
    is_on = models.BooleanField(_("on"), default=False)
    threshold_minor = models.PositiveBigIntegerField(_("threshold"), validators=[MinValueValidator(1)])
    amount_minor = models.PositiveBigIntegerField(_("amount"), validators=[MinValueValidator(1)])
    method_id = models.CharField(_("saved card"), max_length=255)
    method_label = models.CharField(_("card"), max_length=100)
    failures = models.PositiveSmallIntegerField(_("failures in a row"), default=0)
    last_failure = models.CharField(_("last failure"), max_length=100, blank=True)
    retry_at = models.DateTimeField(_("next attempt"), null=True, blank=True)
    set_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", verbose_name=_("set by")
    )
    updated_at = models.DateTimeField(_("changed"), auto_now=True)
    mailed_at = models.DateTimeField(
        null=True, blank=True, editable=False, help_text=_("When the email about missing cards was sent.")
    )
    """That email says that the customer and its saved cards were deleted at the provider (`customers.forget`)."""

    class Meta:
        verbose_name = _("automatic top-up")
        verbose_name_plural = _("automatic top-ups")

    def __str__(self) -> str:
        return str(self.account)


class Refund(models.Model):
    """A refund of a top-up to its payment method. The reference of its transaction is `refund:<id>`."""

    class States(models.TextChoices):
        """The states of a refund. When a refund fails, its amount returns to the wallet."""

        CREATED = "created", _("not yet sent to the provider")
        PENDING = "pending", _("in progress")
        SUCCEEDED = "succeeded", _("refunded")
        FAILED = "failed", _("failed")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    top_up = models.ForeignKey(TopUp, models.PROTECT, related_name="refunds", verbose_name=_("top-up"))
    amount_minor = models.PositiveBigIntegerField(_("amount"), validators=[MinValueValidator(1)])
    reason = models.CharField(_("reason"), max_length=255)
    state = models.CharField(_("state"), max_length=9, choices=States.choices, default=States.CREATED)
    # Null until the provider has the refund, because empty strings would not be unique.
    refund_id = models.CharField(max_length=255, null=True, blank=True, unique=True)
    failure = models.CharField(_("failure"), max_length=100, blank=True)
    requested_by = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        models.SET_NULL,
        null=True,
        related_name="+",
        editable=False,
        verbose_name=_("requested by"),
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
    """A chargeback by the cardholder's bank. `movements` are its withdrawals and returns of money."""

    class States(models.TextChoices):
        """The states of a dispute."""

        OPEN = "open", _("open")
        WON = "won", _("won")
        LOST = "lost", _("lost")

    dispute_id = models.CharField(_("dispute"), max_length=255, unique=True)
    top_up = models.ForeignKey(TopUp, models.PROTECT, related_name="disputes", verbose_name=_("top-up"))
    amount_minor = models.PositiveBigIntegerField(_("amount"), validators=[MinValueValidator(1)])
    reason = models.CharField(_("reason"), max_length=100)
    state = models.CharField(_("state"), max_length=4, choices=States.choices, default=States.OPEN)
    is_withdrawn = models.BooleanField(_("funds withdrawn"), default=False)
    is_reinstated = models.BooleanField(_("funds reinstated"), default=False)
    withdrawn_minor = models.BigIntegerField(_("amount withdrawn"), null=True, help_text=_("Sum of all movements."))
    """Null in rows of version 0.1, which stored only the two flags above."""
    evidence_due_at = models.DateTimeField(_("evidence due"), null=True, blank=True)
    opened_at = models.DateTimeField(_("opened"))
    ended_at = models.DateTimeField(_("ended"), null=True, blank=True)
    mailed_at = models.DateTimeField(_("mailed"), null=True, blank=True)

    class Meta:
        verbose_name = _("dispute")
        verbose_name_plural = _("disputes")
        ordering = ("-opened_at",)
        constraints = (
            models.CheckConstraint(
                # The second part is only checked without a withdrawal, so F("is_withdrawn") is false there. The simpler
                # Q(is_reinstated=False) would need a migration.
                condition=Q(is_withdrawn=True) | Q(is_reinstated=F("is_withdrawn")),
                name="only_what_was_withdrawn_is_reinstated",
            ),
        )

    def __str__(self) -> str:
        return self.dispute_id


class DisputeMovement(models.Model):
    """A withdrawal or return of money by a dispute: Stripe's balance transaction and our transaction for it."""

    dispute = models.ForeignKey(Dispute, models.PROTECT, related_name="movements", verbose_name=_("dispute"))
    balance_transaction = models.CharField(
        _("balance transaction"),
        max_length=255,
        null=True,
        blank=True,
        unique=True,  # null for movements booked by version 0.1
    )
    reference = models.CharField(_("transaction"), max_length=100, unique=True)
    amount_minor = models.BigIntegerField(_("withdrawn"), help_text=_("Negative: reinstated."))
    moved_at = models.DateTimeField(_("when"), default=timezone.now)

    class Meta:
        verbose_name = _("dispute movement")
        verbose_name_plural = _("dispute movements")
        ordering = ("id",)

    def __str__(self) -> str:
        return self.reference

    @property
    def lacks_provider_id(self) -> bool:
        """Return whether the movement lacks the provider's id, as those of version 0.1 do."""
        return self.balance_transaction is None
