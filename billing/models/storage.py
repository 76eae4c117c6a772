"""The daily cost of storage, and the part that each wallet has not paid yet."""

from __future__ import annotations

from decimal import Decimal

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from billing.models.ledger import Account


class StorageDay(models.Model):
    """The storage of an organization on one day, and what it costs. Never edited."""

    account = models.ForeignKey(Account, models.PROTECT, related_name="storage_days", verbose_name=_("account"))
    day = models.DateField(_("day"))
    """A day of the installation's time zone."""
    size_bytes = models.PositiveBigIntegerField(_("size"))
    """Bytes that counted against the quota when this row was written."""
    free_bytes = models.PositiveBigIntegerField(_("free allowance"))
    price = models.DecimalField(_("price per GB and month"), max_digits=14, decimal_places=4)
    cost_minor = models.DecimalField(_("cost"), max_digits=20, decimal_places=6)
    """In minor units, with fractions."""

    class Meta:
        verbose_name = _("day of storage")
        verbose_name_plural = _("days of storage")
        ordering = ("-day",)
        constraints = (models.UniqueConstraint(fields=["account", "day"], name="one_cost_of_storage_per_day"),)

    def __str__(self) -> str:
        return f"{self.account} {self.day}"


class StorageBalance(models.Model):
    """The unpaid storage cost of a wallet: fractions of a minor unit, and amounts that the wallet could not cover."""

    account = models.OneToOneField(Account, models.PROTECT, related_name="storage_balance", verbose_name=_("account"))
    due_minor = models.DecimalField(_("due"), max_digits=20, decimal_places=6, default=Decimal(0))
    payments = models.PositiveIntegerField(_("payments"), default=0)
    """Number of charges to the wallet for storage so far. It makes the reference of each charge's hold unique."""
    unpaid_since = models.DateTimeField(_("unpaid since"), null=True, blank=True)
    """Time since which at least one whole minor unit is due."""
    mailed_at = models.DateTimeField(_("mailed"), null=True, blank=True)
    """When the email about the unpaid amount was sent. None again once less than a minor unit is due."""

    class Meta:
        verbose_name = _("storage balance")
        verbose_name_plural = _("storage balances")
        constraints = (models.CheckConstraint(condition=Q(due_minor__gte=0), name="storage_never_overpaid"),)

    def __str__(self) -> str:
        return str(self.account)

    @property
    def unpaid_minor(self) -> int:
        """Return the amount due, in whole minor units."""
        return int(self.due_minor)
