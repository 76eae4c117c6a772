"""Credit and vouchers. Each grant is a lot: an amount that is used and expires separately from other lots.

The amounts of a lot change only while the wallet's row is locked (`billing.credit`). The unused rest of a lot is part
of the wallet's balance, so a lot needs no account of its own in the ledger.
"""

from __future__ import annotations

import uuid

from django.conf import settings
from django.core.validators import MinValueValidator, RegexValidator
from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _

from billing.models.ledger import Hold
from console.accounts.models import Organization

VOUCHER_CODE = RegexValidator(r"^[A-Z0-9]{6,32}$", _("6 to 32 letters and digits, in capitals."))


class Voucher(models.Model):
    """A code that grants credit, with limits on its uses and validity."""

    code = models.CharField(
        _("code"),
        max_length=32,
        unique=True,
        validators=[VOUCHER_CODE],
        blank=True,
        help_text=_("Leave empty to generate a random code."),
    )
    reason = models.CharField(_("purpose"), max_length=255, help_text=_("Customers see it next to the credit."))
    amount_minor = models.PositiveBigIntegerField(_("amount"), validators=[MinValueValidator(1)])
    currency = models.CharField(_("currency"), max_length=3)
    expires_at = models.DateTimeField(_("redeemable until"), null=True, blank=True)
    credit_days = models.PositiveIntegerField(
        _("validity of the credit (days)"), null=True, blank=True, help_text=_("Leave empty for no expiry.")
    )
    max_uses = models.PositiveIntegerField(_("total uses"), default=1, validators=[MinValueValidator(1)])
    max_uses_each = models.PositiveIntegerField(
        _("uses per organization"), default=1, validators=[MinValueValidator(1)]
    )
    uses = models.PositiveIntegerField(_("used"), default=0, editable=False)
    is_active = models.BooleanField(_("redeemable"), default=True)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", editable=False
    )
    created_at = models.DateTimeField(_("created"), auto_now_add=True)

    class Meta:
        verbose_name = _("voucher")
        verbose_name_plural = _("vouchers")
        ordering = ("-id",)
        constraints = (
            models.CheckConstraint(condition=Q(uses__lte=F("max_uses")), name="voucher_used_no_more_than_it_may"),
        )

    def __str__(self) -> str:
        return self.code


class CreditGrant(models.Model):
    """A lot of credit granted to an organization. The reference of its transaction is `grant:<id>`.

    `used + expired + reserved <= amount`. The rest can be spent until `expires_at`. An open hold can spend its reserved
    credit even later.
    """

    class Sources(models.TextChoices):
        """How the organization got the credit."""

        ADMINISTRATOR = "administrator", _("granted by an administrator")
        VOUCHER = "voucher", _("voucher")
        TRIAL = "trial", _("trial")
        CORRECTION = "correction", _("returned by a credit note")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    organization = models.ForeignKey(
        Organization, models.PROTECT, related_name="credit_grants", verbose_name=_("organization")
    )
    source = models.CharField(
        _("source"), max_length=16, choices=Sources.choices, default=Sources.ADMINISTRATOR, editable=False
    )
    voucher = models.ForeignKey(
        Voucher, models.PROTECT, null=True, blank=True, related_name="grants", editable=False, verbose_name=_("voucher")
    )
    amount_minor = models.PositiveBigIntegerField(_("amount"), validators=[MinValueValidator(1)])
    reason = models.CharField(_("reason"), max_length=255)
    expires_at = models.DateTimeField(_("expires"), null=True, blank=True, help_text=_("Leave empty for no expiry."))
    used_minor = models.PositiveBigIntegerField(_("used"), default=0, editable=False)
    reserved_minor = models.PositiveBigIntegerField(_("reserved"), default=0, editable=False)
    expired_minor = models.PositiveBigIntegerField(_("expired"), default=0, editable=False)
    granted_by = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        models.SET_NULL,
        null=True,
        related_name="+",
        editable=False,
        verbose_name=_("granted by"),
    )
    received_by = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        models.SET_NULL,
        null=True,
        blank=True,
        related_name="+",
        editable=False,
        verbose_name=_("received by"),
    )
    """The member who redeemed the voucher, or who activated the service for the organization and so
    received the trial credit."""
    created_at = models.DateTimeField(_("when"), auto_now_add=True)

    class Meta:
        verbose_name = _("credit grant")
        verbose_name_plural = _("credit grants")
        ordering = ("-created_at",)
        indexes = (
            models.Index(
                fields=["organization", "expires_at"],
                name="credit_that_is_left",
                condition=Q(amount_minor__gt=F("used_minor") + F("expired_minor")),
            ),
        )
        constraints = (
            models.CheckConstraint(
                condition=Q(amount_minor__gte=F("used_minor") + F("expired_minor") + F("reserved_minor")),
                name="credit_is_used_once",
            ),
            models.UniqueConstraint(
                fields=["organization"], condition=Q(source="trial"), name="one_trial_for_an_organization"
            ),
            models.UniqueConstraint(fields=["received_by"], condition=Q(source="trial"), name="one_trial_for_a_person"),
        )

    def __str__(self) -> str:
        return f"{self.organization}: {self.reason}"

    @property
    def left_minor(self) -> int:
        """Return the amount that is neither used nor expired, in minor units."""
        return self.amount_minor - self.used_minor - self.expired_minor

    @property
    def free_minor(self) -> int:
        """Return the amount that is left and that no open hold reserves, in minor units."""
        return self.left_minor - self.reserved_minor


class CreditUse(models.Model):
    """The amount that one hold takes from one lot: reserved while the hold is open, and used by its charge."""

    hold = models.ForeignKey(Hold, models.PROTECT, related_name="credit_uses", verbose_name=_("hold"))
    grant = models.ForeignKey(CreditGrant, models.PROTECT, related_name="uses")
    reserved_minor = models.PositiveBigIntegerField(_("reserved"), default=0)
    used_minor = models.PositiveBigIntegerField(_("used"), default=0)

    class Meta:
        verbose_name = _("credit use")
        verbose_name_plural = _("credit uses")
        constraints = (models.UniqueConstraint(fields=["hold", "grant"], name="one_use_of_a_credit_by_a_hold"),)

    def __str__(self) -> str:
        return str(self.hold)
