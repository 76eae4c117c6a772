"""Budgets and their alerts. An alert's row is written before its mail, once per budget, month and threshold."""

from __future__ import annotations

from django.conf import settings
from django.core.validators import MinValueValidator
from django.db import models
from django.utils.translation import gettext_lazy as _

from billing.models.ledger import Account
from console.accounts.models import Organization


class Budget(models.Model):
    """The amount that an organization, or one member of it, may spend and hold in a calendar month."""

    organization = models.ForeignKey(
        Organization, models.CASCADE, related_name="budgets", verbose_name=_("organization")
    )
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        models.CASCADE,
        null=True,
        blank=True,
        related_name="+",
        verbose_name=_("member"),
        help_text=_("Leave empty for the whole organization."),
    )
    amount_minor = models.PositiveBigIntegerField(_("monthly amount"), validators=[MinValueValidator(1)])
    set_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", editable=False)
    updated_at = models.DateTimeField(_("changed"), auto_now=True)

    class Meta:
        verbose_name = _("budget")
        verbose_name_plural = _("budgets")
        ordering = ("organization", "pk")
        constraints = (
            models.UniqueConstraint(fields=["organization", "user"], name="one_budget_each", nulls_distinct=False),
        )

    def __str__(self) -> str:
        return f"{self.organization} {self.user or ''}".strip()


class BudgetAlert(models.Model):
    """A threshold that a budget reached in a month.

    `month` is the first day of the month. `committed_minor` is the money charged in the month plus the money held when
    the threshold was reached. `mailed_at` is set without an email if a higher threshold was reached at the same time.
    """

    budget = models.ForeignKey(Budget, models.CASCADE, related_name="alerts")
    month = models.DateField()
    percent = models.PositiveSmallIntegerField()
    committed_minor = models.PositiveBigIntegerField(_("committed"))
    created_at = models.DateTimeField(auto_now_add=True)
    mailed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name = _("budget alert")
        verbose_name_plural = _("budget alerts")
        ordering = ("-id",)
        constraints = (
            models.UniqueConstraint(fields=["budget", "month", "percent"], name="one_alert_for_a_threshold_a_month"),
        )

    def __str__(self) -> str:
        return f"{self.budget} {self.month:%Y-%m} {self.percent} %"


class BalanceWarning(models.Model):
    """A wallet whose low balance was reported. The row is deleted once the balance is no longer low."""

    account = models.OneToOneField(Account, models.CASCADE, related_name="warning")
    created_at = models.DateTimeField(auto_now_add=True)
    mailed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name = _("low balance")
        verbose_name_plural = _("low balances")

    def __str__(self) -> str:
        return str(self.account)
