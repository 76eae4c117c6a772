"""Invoices and credit notes, who writes them, and whom they are for.

One rule: an invoice and its lines are never changed (triggers); the database counts its numbers without a gap, and
refuses one that does not equal its lines.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _

from billing.models.ledger import Receipt
from console.accounts.models import Organization

RATE_LIMITS = (MinValueValidator(Decimal(0)), MaxValueValidator(Decimal(100)))


class BillingPolicy(models.Model):
    """What an administrator sets for the whole installation: the seller, tax, the trial, free probes. One row."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1, editable=False)
    seller_name = models.CharField(_("seller"), max_length=200, blank=True)
    seller_address = models.TextField(_("address of the seller"), blank=True)
    seller_tax_id = models.CharField(_("tax number of the seller"), max_length=64, blank=True)
    invoice_prefix = models.CharField(
        _("invoice numbers begin with"), max_length=16, blank=True, default="INV-", help_text=_("Then comes the count.")
    )
    note_prefix = models.CharField(_("credit note numbers begin with"), max_length=16, blank=True, default="CN-")
    footer = models.TextField(_("text at the end of invoices"), blank=True)
    tax_name = models.CharField(_("name of the tax"), max_length=32, blank=True, default="VAT")
    tax_percent = models.DecimalField(
        _("tax (%)"), max_digits=6, decimal_places=3, default=Decimal(0), validators=RATE_LIMITS
    )
    tax_inclusive = models.BooleanField(_("prices include the tax"), default=True)
    trial_credit_minor = models.PositiveBigIntegerField(
        _("trial credit (minor units)"), default=0, help_text=_("Given once, when a customer activates the service.")
    )
    trial_credit_days = models.PositiveIntegerField(_("days the trial credit lasts"), default=30)
    probes_per_day = models.PositiveSmallIntegerField(
        _("free probes a day"), default=5, help_text=_("For each organization. 0: no probes.")
    )

    class Meta:
        verbose_name = _("billing policy")
        verbose_name_plural = _("billing policy")
        constraints = (models.CheckConstraint(condition=Q(id=1), name="one_billing_policy"),)

    def __str__(self) -> str:
        return str(_("Billing policy"))


class BillingDetails(models.Model):
    """Whom an organization's invoices are for, and its own tax where it has one."""

    organization = models.OneToOneField(Organization, models.CASCADE, related_name="billing_details")
    name = models.CharField(_("name on the invoice"), max_length=200, blank=True)
    address = models.TextField(_("address"), max_length=1000, blank=True)
    tax_id = models.CharField(_("tax number"), max_length=64, blank=True)
    tax_percent = models.DecimalField(
        _("tax (%)"),
        max_digits=6,
        decimal_places=3,
        null=True,
        blank=True,
        validators=RATE_LIMITS,
        help_text=_("Empty: as the policy says."),
    )
    tax_inclusive = models.BooleanField(_("prices include the tax"), null=True, blank=True)
    tax_note = models.CharField(_("tax note"), max_length=255, blank=True, help_text=_("Such as: reverse charge."))

    class Meta:
        verbose_name = _("billing details")
        verbose_name_plural = _("billing details")

    def __str__(self) -> str:
        return str(self.organization)


class InvoiceSeries(models.Model):
    """The count of one kind of document; locked while a number is taken."""

    kind = models.CharField(primary_key=True, max_length=8)
    last = models.PositiveBigIntegerField(default=0)

    class Meta:
        verbose_name = _("series of numbers")
        verbose_name_plural = _("series of numbers")

    def __str__(self) -> str:
        return f"{self.kind} {self.last}"


class Invoice(models.Model):
    """What an organization was charged in a period; or, as a credit note (amounts negative), what it got back.

    `subtotal + credits = taxable`; prices with tax: `total = taxable`; without: `total = taxable + tax`.
    """

    class Kinds(models.TextChoices):
        """Which document it is."""

        INVOICE = "invoice", _("invoice")
        CREDIT_NOTE = "note", _("credit note")

    kind = models.CharField(_("kind"), max_length=8, choices=Kinds.choices, default=Kinds.INVOICE)
    sequence = models.PositiveBigIntegerField(_("count"))
    number = models.CharField(_("number"), max_length=40, unique=True)
    organization = models.ForeignKey(Organization, models.PROTECT, related_name="invoices")
    currency = models.CharField(_("currency"), max_length=3)
    period_start = models.DateField(_("from"))
    period_end = models.DateField(_("to"))
    seller = models.JSONField(help_text=_("name, address, tax_id, footer: as they were"))
    customer = models.JSONField(help_text=_("name, address, tax_id, tax_note: as they were"))
    tax_name = models.CharField(_("tax"), max_length=32, blank=True)
    tax_percent = models.DecimalField(_("tax (%)"), max_digits=6, decimal_places=3)
    tax_inclusive = models.BooleanField(_("prices include the tax"))
    line_count = models.PositiveIntegerField(_("lines"))
    subtotal_minor = models.BigIntegerField(_("sum of the lines"))
    credits_minor = models.BigIntegerField(_("credits"), help_text=_("What credits paid: 0 or less on an invoice."))
    tax_minor = models.BigIntegerField(_("tax due"))
    total_minor = models.BigIntegerField(_("total"))
    corrects = models.ForeignKey(
        "self", models.PROTECT, null=True, blank=True, related_name="notes", verbose_name=_("corrects")
    )
    reason = models.CharField(_("reason"), max_length=255, blank=True)
    issued_by = models.CharField(_("issued by"), max_length=254, blank=True)
    issued_at = models.DateTimeField(_("issued"))

    class Meta:
        verbose_name = _("invoice")
        verbose_name_plural = _("invoices")
        ordering = ("-id",)
        constraints = (
            models.UniqueConstraint(fields=["kind", "sequence"], name="one_invoice_of_a_number"),
            models.CheckConstraint(
                condition=Q(tax_inclusive=True, total_minor=F("subtotal_minor") + F("credits_minor"))
                | Q(tax_inclusive=False, total_minor=F("subtotal_minor") + F("credits_minor") + F("tax_minor")),
                name="invoice_adds_up",
            ),
            models.CheckConstraint(
                condition=Q(
                    kind="invoice",
                    corrects__isnull=True,
                    subtotal_minor__gt=0,
                    total_minor__gte=0,
                    credits_minor__lte=0,
                )
                | Q(
                    kind="note", corrects__isnull=False, subtotal_minor__lt=0, total_minor__lte=0, credits_minor__gte=0
                ),
                name="a_note_corrects_an_invoice",
            ),
        )

    def __str__(self) -> str:
        return self.number

    @property
    def taxable_minor(self) -> int:
        """What the tax is of, or in: the lines less what credits paid."""
        return self.subtotal_minor + self.credits_minor

    @property
    def net_minor(self) -> int:
        """The total without the tax."""
        return self.total_minor - self.tax_minor


class InvoiceLine(models.Model):
    """One receipt on an invoice; on a credit note, what of an invoice's line is given back."""

    invoice = models.ForeignKey(Invoice, models.PROTECT, related_name="lines")
    position = models.PositiveIntegerField()
    receipt = models.OneToOneField(Receipt, models.PROTECT, null=True, blank=True, related_name="invoice_line")
    corrects = models.ForeignKey("self", models.PROTECT, null=True, blank=True, related_name="corrections")
    title = models.CharField(max_length=255)
    amount_minor = models.BigIntegerField()
    credit_minor = models.BigIntegerField(help_text=_("What credits paid of it: 0 or less on an invoice."))

    class Meta:
        verbose_name = _("line of an invoice")
        verbose_name_plural = _("lines of invoices")
        ordering = ("position",)
        constraints = (
            models.UniqueConstraint(fields=["invoice", "position"], name="one_line_at_a_position"),
            models.CheckConstraint(
                condition=Q(receipt__isnull=False, corrects__isnull=True)
                | Q(receipt__isnull=True, corrects__isnull=False),
                name="a_line_is_of_a_receipt_or_a_line",
            ),
        )

    def __str__(self) -> str:
        return f"{self.invoice} {self.position}"

    @property
    def receipt_lines(self) -> list[dict[str, Any]]:
        """The lines of its receipt, each with the rule behind it."""
        return list(self.receipt.lines) if self.receipt else []


class InvoiceDocument(models.Model):
    """An invoice as it was first drawn in a language: the same bytes for whoever asks, ever after."""

    invoice = models.ForeignKey(Invoice, models.PROTECT, related_name="documents")
    language = models.CharField(max_length=8)
    content = models.BinaryField()
    sha256 = models.CharField(max_length=64)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name = _("document of an invoice")
        verbose_name_plural = _("documents of invoices")
        constraints = (models.UniqueConstraint(fields=["invoice", "language"], name="one_document_in_a_language"),)

    def __str__(self) -> str:
        return f"{self.invoice} {self.language}"


class InvoiceMail(models.Model):
    """That an invoice, written by itself for a month, is to be told by mail; the row is claimed by whoever sends it."""

    invoice = models.OneToOneField(Invoice, models.PROTECT, related_name="mail")
    mailed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name = _("mail about an invoice")
        verbose_name_plural = _("mails about invoices")
        indexes = (models.Index(fields=["id"], condition=Q(mailed_at=None), name="invoice_mails_that_wait"),)

    def __str__(self) -> str:
        return str(self.invoice)
