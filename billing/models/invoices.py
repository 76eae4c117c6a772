"""Invoices, credit notes, the billing policy and billing details.

Triggers keep invoices and their lines unchanged, refuse gaps in the numbers, and check that lines sum to their invoice.
Newer columns have a `db_default`, because processes of the previous release write rows too during an upgrade.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from billing.models.ledger import Receipt
from console.accounts.models import Organization

PERCENT_LIMITS = (MinValueValidator(Decimal(0)), MaxValueValidator(Decimal(100)))


class BillingPolicy(models.Model):
    """The installation's billing settings: seller, tax, trial credit, free estimates (`probes`), storage. One row."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1, editable=False)
    seller_name = models.CharField(_("seller"), max_length=200, blank=True)
    seller_address = models.TextField(_("seller address"), blank=True)
    seller_tax_id = models.CharField(_("seller tax number"), max_length=64, blank=True)
    invoice_prefix = models.CharField(
        _("invoice number prefix"), max_length=16, blank=True, default="INV-", help_text=_("A sequence number follows.")
    )
    note_prefix = models.CharField(_("credit note number prefix"), max_length=16, blank=True, default="CN-")
    footer = models.TextField(_("invoice footer"), blank=True)
    tax_name = models.CharField(_("tax name"), max_length=32, blank=True, default="VAT")
    tax_percent = models.DecimalField(
        _("tax (%)"), max_digits=6, decimal_places=3, default=Decimal(0), validators=PERCENT_LIMITS
    )
    tax_inclusive = models.BooleanField(_("prices include the tax"), default=True)
    trial_credit_minor = models.PositiveBigIntegerField(
        _("trial credit"), default=0, help_text=_("Granted once, when a customer activates the service.")
    )
    trial_credit_days = models.PositiveIntegerField(_("validity of the trial credit (days)"), default=30)
    probes_per_day = models.PositiveSmallIntegerField(
        _("free probes per day"),
        default=5,
        help_text=_("Per organization, and per person across all organizations. Enter 0 for no probes."),
    )
    probes_need_payment = models.BooleanField(
        _("free probes only after a first payment"),
        default=False,
        db_default=False,
        help_text=_("For consoles with open sign-up, where new accounts are free."),
    )
    free_storage_gb = models.PositiveIntegerField(
        _("free storage (GB)"),
        default=10,
        db_default=10,
        help_text=_("Per organization. Storage beyond it costs the price book's price, if it has one."),
    )

    class Meta:
        verbose_name = _("billing policy")
        verbose_name_plural = _("billing policy")
        constraints = (models.CheckConstraint(condition=Q(id=1), name="one_billing_policy"),)

    def __str__(self) -> str:
        return str(_("Billing policy"))


class BillingDetails(models.Model):
    """The recipient of an organization's invoices, and the organization's own tax if it has one."""

    organization = models.OneToOneField(
        Organization, models.CASCADE, related_name="billing_details", verbose_name=_("organization")
    )
    name = models.CharField(_("name on the invoice"), max_length=200, blank=True)
    address = models.TextField(_("address"), max_length=1000, blank=True)
    tax_id = models.CharField(_("tax number"), max_length=64, blank=True)
    tax_percent = models.DecimalField(
        _("tax (%)"),
        max_digits=6,
        decimal_places=3,
        null=True,
        blank=True,
        validators=PERCENT_LIMITS,
        help_text=_("Leave empty to use the billing policy."),
    )
    tax_inclusive = models.BooleanField(_("prices include the tax"), null=True, blank=True)
    tax_note = models.CharField(_("tax note"), max_length=255, blank=True, help_text=_("For example: reverse charge."))

    class Meta:
        verbose_name = _("billing details")
        verbose_name_plural = _("billing details")

    def __str__(self) -> str:
        return str(self.organization)


class InvoiceSeries(models.Model):
    """The number series of one kind of document, locked while a number is assigned."""

    kind = models.CharField(primary_key=True, max_length=8)
    last = models.PositiveBigIntegerField(default=0)
    """The `sequence` of the newest document of this kind; 0 before the first."""

    class Meta:
        verbose_name = _("number series")
        verbose_name_plural = _("number series")

    def __str__(self) -> str:
        return f"{self.kind} {self.last}"


class Invoice(models.Model):
    """The charges of an organization in a period, or a credit note (with negative amounts) that corrects them.

    `subtotal + credits = taxable`. If prices include the tax, `total = taxable`, otherwise `total = taxable + tax`.
    """

    class Kinds(models.TextChoices):
        """The kind of document."""

        INVOICE = "invoice", _("invoice")
        CREDIT_NOTE = "note", _("credit note")

    kind = models.CharField(_("kind"), max_length=8, choices=Kinds.choices, default=Kinds.INVOICE)
    sequence = models.PositiveBigIntegerField(_("count"))
    """The running number among documents of this kind. `number` is made from it and a prefix."""
    number = models.CharField(_("number"), max_length=40, unique=True)
    organization = models.ForeignKey(
        Organization, models.PROTECT, related_name="invoices", verbose_name=_("organization")
    )
    currency = models.CharField(_("currency"), max_length=3)
    period_start = models.DateField(_("from"))
    period_end = models.DateField(_("to"))
    seller = models.JSONField(
        _("seller"), help_text=_("Keys: name, address, tax_id, footer. Copied when the invoice was issued.")
    )
    customer = models.JSONField(
        _("customer"), help_text=_("Keys: name, address, tax_id, tax_note. Copied when the invoice was issued.")
    )
    tax_name = models.CharField(_("tax"), max_length=32, blank=True)
    tax_percent = models.DecimalField(_("tax (%)"), max_digits=6, decimal_places=3)
    tax_inclusive = models.BooleanField(_("prices include the tax"))
    line_count = models.PositiveIntegerField(_("lines"))
    """Number of lines. A trigger compares it with the lines, so that none can be added later."""
    subtotal_minor = models.BigIntegerField(_("subtotal"))
    credits_minor = models.BigIntegerField(_("credits"), help_text=_("Amount paid by credit: 0 or less on an invoice."))
    tax_minor = models.BigIntegerField(_("tax due"))
    total_minor = models.BigIntegerField(_("total"))
    corrects = models.ForeignKey(
        "self", models.PROTECT, null=True, blank=True, related_name="notes", verbose_name=_("corrects")
    )
    reason = models.CharField(_("reason"), max_length=255, blank=True)
    issued_by = models.CharField(_("issued by"), max_length=254, blank=True)
    """Email address of the user who issued it; empty for a periodic invoice."""
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
        """Return the taxable amount in minor units: the sum of the lines without the part that credit paid."""
        return self.subtotal_minor + self.credits_minor


class InvoiceLine(models.Model):
    """A receipt on an invoice, or on a credit note the correction of an invoice line."""

    invoice = models.ForeignKey(Invoice, models.PROTECT, related_name="lines")
    position = models.PositiveIntegerField(_("position"))
    receipt = models.OneToOneField(
        Receipt, models.PROTECT, null=True, blank=True, related_name="invoice_line", verbose_name=_("receipt")
    )
    corrects = models.ForeignKey("self", models.PROTECT, null=True, blank=True, related_name="corrections")
    """On a credit note: the line of the invoice."""
    title = models.CharField(pgettext_lazy("of a receipt", "title"), max_length=255)
    amount_minor = models.BigIntegerField(_("amount"))
    credit_minor = models.BigIntegerField(
        _("paid by credit"), help_text=_("Part paid by credit: 0 or less on an invoice.")
    )

    class Meta:
        verbose_name = _("invoice line")
        verbose_name_plural = _("invoice lines")
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
        """Return the lines of the receipt, none on a credit note."""
        return list(self.receipt.lines) if self.receipt else []


class InvoiceDocument(models.Model):
    """The PDF of an invoice in one language, stored when first rendered."""

    invoice = models.ForeignKey(Invoice, models.PROTECT, related_name="documents")
    language = models.CharField(max_length=8)
    content = models.BinaryField()
    sha256 = models.CharField(max_length=64)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name = _("invoice document")
        verbose_name_plural = _("invoice documents")
        constraints = (models.UniqueConstraint(fields=["invoice", "language"], name="one_document_in_a_language"),)

    def __str__(self) -> str:
        return f"{self.invoice} {self.language}"


class InvoiceMail(models.Model):
    """An email to send about a periodic invoice. The sender sets `mailed_at` when each recipient has got it."""

    invoice = models.OneToOneField(Invoice, models.PROTECT, related_name="mail")
    mailed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name = _("invoice email")
        verbose_name_plural = _("invoice emails")
        indexes = (models.Index(fields=["id"], condition=Q(mailed_at=None), name="invoice_mails_that_wait"),)

    def __str__(self) -> str:
        return str(self.invoice)
