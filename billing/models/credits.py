"""Credit: money that was given, not paid. Each grant is a lot that is used up or expires by itself.

One rule: a lot's figures change only while its wallet's row is locked (`billing.credit`); what is left of a lot is in
the wallet's balance, so the ledger needs no account for it.
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
    """A code that gives credit to whoever enters it, so often and so long as its row says."""

    code = models.CharField(
        _("code"),
        max_length=32,
        unique=True,
        validators=[VOUCHER_CODE],
        blank=True,
        help_text=_("Leave it empty, and one that can't be guessed is made."),
    )
    reason = models.CharField(_("what for"), max_length=255, help_text=_("Shown to customers beside the credit."))
    amount_minor = models.PositiveBigIntegerField(_("amount (minor units)"), validators=[MinValueValidator(1)])
    currency = models.CharField(_("currency"), max_length=3)
    expires_at = models.DateTimeField(_("can be entered until"), null=True, blank=True)
    credit_days = models.PositiveIntegerField(
        _("days the credit lasts"), null=True, blank=True, help_text=_("Empty: it doesn't expire.")
    )
    max_uses = models.PositiveIntegerField(_("uses in total"), default=1, validators=[MinValueValidator(1)])
    max_uses_each = models.PositiveIntegerField(
        _("uses for each organization"), default=1, validators=[MinValueValidator(1)]
    )
    uses = models.PositiveIntegerField(_("used"), default=0, editable=False)
    is_active = models.BooleanField(_("can be entered"), default=True)
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
    """Credit given to an organization: one lot. Its transaction is `grant:<id>`.

    `used + expired + reserved <= amount`; what is left can be spent until it expires. What is reserved backs an open
    hold, and stays good for it.
    """

    class Sources(models.TextChoices):
        """Where a credit comes from."""

        ADMINISTRATOR = "administrator", _("given by an administrator")
        VOUCHER = "voucher", _("voucher")
        TRIAL = "trial", _("trial")
        CORRECTION = "correction", _("given back by a credit note")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    organization = models.ForeignKey(Organization, models.PROTECT, related_name="credit_grants")
    source = models.CharField(
        _("source"), max_length=16, choices=Sources.choices, default=Sources.ADMINISTRATOR, editable=False
    )
    voucher = models.ForeignKey(
        Voucher, models.PROTECT, null=True, blank=True, related_name="grants", editable=False, verbose_name=_("voucher")
    )
    amount_minor = models.PositiveBigIntegerField(_("amount (minor units)"), validators=[MinValueValidator(1)])
    reason = models.CharField(_("reason"), max_length=255)
    expires_at = models.DateTimeField(_("expires"), null=True, blank=True, help_text=_("Empty: never."))
    used_minor = models.PositiveBigIntegerField(_("used"), default=0, editable=False)
    reserved_minor = models.PositiveBigIntegerField(_("reserved"), default=0, editable=False)
    expired_minor = models.PositiveBigIntegerField(_("expired"), default=0, editable=False)
    granted_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", editable=False
    )
    received_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+", editable=False
    )
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
        return f"{self.organization} {self.amount_minor}"

    @property
    def left_minor(self) -> int:
        """What is neither used nor expired, be it reserved or not."""
        return self.amount_minor - self.used_minor - self.expired_minor

    @property
    def free_minor(self) -> int:
        """What is left and backs no open hold."""
        return self.left_minor - self.reserved_minor


class CreditUse(models.Model):
    """What one credit does for one hold: reserved while the hold is open, used when it was charged."""

    hold = models.ForeignKey(Hold, models.PROTECT, related_name="credit_uses")
    grant = models.ForeignKey(CreditGrant, models.PROTECT, related_name="uses")
    reserved_minor = models.PositiveBigIntegerField(default=0)
    used_minor = models.PositiveBigIntegerField(default=0)

    class Meta:
        verbose_name = _("use of a credit")
        verbose_name_plural = _("uses of credits")
        constraints = (models.UniqueConstraint(fields=["hold", "grant"], name="one_use_of_a_credit_by_a_hold"),)

    def __str__(self) -> str:
        return f"{self.hold} {self.used_minor}"
