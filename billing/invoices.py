"""Invoices and credit notes: their numbers, receipts, tax and postings.

One transaction locks the number series and writes the number, the document and the postings. Therefore numbers have no
gaps, a receipt is on one invoice only, and a repeated call issues nothing twice. A document never changes. A correction
is a credit note: a document with negative amounts.

Runs are charged when they end, so an invoice posts only the tax. If prices include tax, the tax comes from revenue. If
not, it comes from paid-in money in the wallet. The part that the wallet lacks becomes a debt of the organization
(receivable).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db import transaction
from django.db.models import F, QuerySet, Sum
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from billing import credit, ledger, receivables
from billing.amounts import money
from billing.costs import month_of
from billing.errors import InvoiceRefused
from billing.models import Account, BillingDetails, Invoice, InvoiceLine, InvoiceMail, InvoiceSeries, Receipt
from billing.policy import policy
from billing.taxes import Tax, tax_for
from console.accounts.models import Organization, User
from console.accounts.zones import installation_time
from console.core.errors import NotFound
from console.notifications import services as notifications

logger = logging.getLogger(__name__)

NUMBER_DIGITS = 6
"""Least number of digits in an invoice number, with leading zeros. File managers and tables sort numbers as strings;
the first million then sort correctly."""


def issue_due() -> list[Invoice]:
    """Issue an invoice to each organization with uninvoiced charges of past months, and return the invoices.

    A failure for one organization is logged and retried by the next call; the others are not affected.
    """
    until = month_of().start
    uninvoiced = _uninvoiced().filter(created_at__lt=until, total_minor__gt=0).values("organization")
    issued = []
    for organization in Organization.objects.filter(pk__in=uninvoiced).order_by("pk"):
        try:
            invoice = issue(organization=organization, until=until)
        except Exception:
            logger.exception("The invoice of organization %s could not be issued. It will be retried.", organization.pk)
        else:
            if invoice:
                issued.append(invoice)
    return issued


@transaction.atomic
def issue(*, organization: Organization, until: datetime | None = None, user: User | None = None) -> Invoice | None:
    """Issue an invoice for all uninvoiced receipts before `until` (default: now).

    Returns None if the receipts cost nothing. An invoice with `until` is a periodic one: an email and a notification
    announce it. `user` is the member who requested the invoice, None for a periodic one. Idempotent and safe under
    concurrent calls.
    """
    issued_at = timezone.now()
    period_end = until or issued_at
    series = _locked_series(Invoice.Kinds.INVOICE)
    receipts = list(_uninvoiced().filter(organization=organization, created_at__lt=period_end).order_by("pk"))
    if not sum(receipt.total_minor for receipt in receipts):  # free runs alone need no invoice
        return None
    credit_by_hold = credit.used_by_hold([receipt.hold_id for receipt in receipts])
    tax, billing_policy = tax_for(organization), policy()
    subtotal = sum(receipt.total_minor for receipt in receipts)
    paid_by_credit = sum(credit_by_hold.values())
    tax_minor = tax.of(subtotal - paid_by_credit)  # the customer did not pay for credit, so it is not taxed
    # `until` is the first moment after the period, and the printed period ends with its last day.
    last_day = installation_time(period_end) - timedelta(microseconds=1 if until else 0)
    sequence = _next_number(series)
    invoice = Invoice.objects.create(
        kind=Invoice.Kinds.INVOICE,
        sequence=sequence,
        number=f"{billing_policy.invoice_prefix}{sequence:0{NUMBER_DIGITS}d}",
        organization=organization,
        currency=receipts[0].currency,  # of all: an organization has one wallet, in one currency
        period_start=min(installation_time(receipt.created_at).date() for receipt in receipts),
        period_end=last_day.date(),
        seller=_seller(),
        customer=_customer(organization),
        tax_name=tax.name,
        tax_percent=tax.percent,
        tax_inclusive=tax.inclusive,
        line_count=len(receipts),
        subtotal_minor=subtotal,
        credits_minor=-paid_by_credit,
        tax_minor=tax_minor,
        total_minor=subtotal - paid_by_credit + (0 if tax.inclusive else tax_minor),
        issued_by=user.email if user else "",
        issued_at=issued_at,
    )
    InvoiceLine.objects.bulk_create(
        InvoiceLine(
            invoice=invoice,
            position=position,
            receipt=receipt,
            title=receipt.title,
            amount_minor=receipt.total_minor,
            credit_minor=-credit_by_hold.get(receipt.hold_id, 0),
        )
        for position, receipt in enumerate(receipts, 1)
    )
    _post_tax(invoice)
    if until is not None:  # periodic: nobody requested it, so send an email
        InvoiceMail.objects.create(invoice=invoice)
        data = {
            "invoice": invoice.pk,
            "number": invoice.number,
            "total_minor": invoice.total_minor,
            "currency": invoice.currency,
        }
        notifications.publish(organization=invoice.organization, kind="invoice.issued", data=data)
    return invoice


@transaction.atomic
def correct(
    *, invoice: Invoice, amounts: Mapping[int, int], reason: str, user: User | None, notes_seen: int | None = None
) -> Invoice:
    """Issue a credit note that returns `amounts` (minor units by the line's id) to the wallet.

    For each line, paid-in money is returned first, then credit. Returned credit does not expire. Each note also returns
    the tax on its paid-in money. The note that returns the last of that money returns all tax that is left.

    `notes_seen` is the number of notes that the user's page showed. If the number has changed, the note is refused, so
    a form that is submitted twice issues one note. Raises InvoiceRefused.
    """
    series = _locked_series(Invoice.Kinds.CREDIT_NOTE)
    if notes_seen is not None and invoice.notes.count() != notes_seen:
        raise InvoiceRefused(
            _("Another credit note was issued in the meantime. Check the remaining amounts and try again.")
        )
    if invoice.kind != Invoice.Kinds.INVOICE:
        raise InvoiceRefused(_("A credit note can't be corrected. Correct its invoice instead."))
    if not reason.strip():
        raise InvoiceRefused(fields={"reason": _("Enter a reason. It is printed on the credit note.")})
    parts = _split_amounts(invoice, {line: amount for line, amount in amounts.items() if amount})
    returned_credit = sum(part.credit_minor for part in parts)
    returned_paid = sum(part.paid_minor for part in parts)
    returned = returned_paid + returned_credit
    # Notes have negative amounts and taxes, and positive credits. So adding the sums of the earlier notes to the
    # invoice's figures gives what is left.
    earlier = invoice.notes.aggregate(
        subtotal=Sum("subtotal_minor", default=0),
        credits=Sum("credits_minor", default=0),
        tax=Sum("tax_minor", default=0),
    )
    taxable_left = invoice.taxable_minor + earlier["subtotal"] + earlier["credits"] - returned_paid
    tax = Tax(invoice.tax_name, invoice.tax_percent, invoice.tax_inclusive)
    # The tax on what stays charged is rounded, and the note returns the rest of the tax. If each note rounded its own
    # tax, a cent could remain after the last one.
    returned_tax = invoice.tax_minor + earlier["tax"] - tax.of(taxable_left)
    sequence = _next_number(series)
    note = Invoice.objects.create(
        kind=Invoice.Kinds.CREDIT_NOTE,
        sequence=sequence,
        number=f"{policy().note_prefix}{sequence:0{NUMBER_DIGITS}d}",
        organization_id=invoice.organization_id,
        currency=invoice.currency,
        period_start=invoice.period_start,
        period_end=invoice.period_end,
        seller=_seller(),
        customer=_customer(invoice.organization),
        tax_name=invoice.tax_name,
        tax_percent=invoice.tax_percent,
        tax_inclusive=invoice.tax_inclusive,
        line_count=len(parts),
        subtotal_minor=-returned,
        credits_minor=returned_credit,
        tax_minor=-returned_tax,
        total_minor=-returned_paid - (0 if invoice.tax_inclusive else returned_tax),
        corrects=invoice,
        reason=reason.strip()[:255],
        issued_by=user.email if user else "",
        issued_at=timezone.now(),
    )
    InvoiceLine.objects.bulk_create(
        InvoiceLine(
            invoice=note,
            position=position,
            corrects=part.line,
            title=part.line.title,
            amount_minor=-(part.paid_minor + part.credit_minor),
            credit_minor=part.credit_minor,
        )
        for position, part in enumerate(parts, 1)
    )
    _post_note(note)
    return note


def invoices_for(organization: Organization) -> QuerySet[Invoice]:
    """Return the invoices and credit notes of an organization, newest first."""
    return Invoice.objects.filter(organization=organization).select_related("corrects").order_by("-id")


def invoice_for(organization: Organization, pk: int) -> Invoice:
    """Return an invoice or credit note. Raises NotFound if it does not exist or belongs to another organization."""
    invoice = invoices_for(organization).filter(pk=pk).first()
    if invoice is None:
        raise NotFound
    return invoice


def uninvoiced_minor(organization: Organization) -> int:
    """Return the charges that are not on an invoice yet, in minor units.

    An invoice's subtotal is the sum of its receipts. So this subtracts the subtotals from all charges. To find the
    receipts without an invoice would take a join over all receipts.
    """
    charged = Receipt.objects.filter(organization=organization).aggregate(total=Sum("total_minor", default=0))
    invoices = Invoice.objects.filter(organization=organization, kind=Invoice.Kinds.INVOICE)
    return int(charged["total"] - invoices.aggregate(total=Sum("subtotal_minor", default=0))["total"])


def corrections_of(receipt: Receipt) -> QuerySet[InvoiceLine]:
    """Return the lines of credit notes that correct a receipt, oldest first. `returned_minor` is what each returned."""
    lines = InvoiceLine.objects.filter(corrects__receipt=receipt).select_related("invoice").order_by("pk")
    return lines.annotate(returned_minor=-F("amount_minor"))


class CorrectableLine(NamedTuple):
    """A line of an invoice, and the amount that credit notes can still return, in minor units."""

    line: InvoiceLine
    remaining_minor: int


def correctable_lines(invoice: Invoice) -> list[CorrectableLine]:
    """Return the lines of an invoice with their remaining amounts."""
    lines = invoice.lines.annotate(corrected=Sum("corrections__amount_minor", default=0))
    return [CorrectableLine(line, line.amount_minor + line.corrected) for line in lines]  # corrections are negative


class ReturnedPart(NamedTuple):
    """The amount of one invoice line that a credit note returns: paid-in money and credit, in minor units."""

    line: InvoiceLine
    paid_minor: int
    credit_minor: int


def _split_amounts(invoice: Invoice, amounts: Mapping[int, int]) -> list[ReturnedPart]:
    """Split the amount to return for each line (by its id) into paid-in money and credit. Raises InvoiceRefused.

    Corrections have negative amounts, so adding these to a line's amount gives the amount that is left.
    """
    lines = invoice.lines.annotate(
        corrected=Sum("corrections__amount_minor", default=0),
        corrected_credit=Sum("corrections__credit_minor", default=0),
    ).in_bulk(list(amounts))
    if not amounts or set(lines) != set(amounts):
        raise InvoiceRefused(_("Choose lines of this invoice and enter an amount for each."))
    parts = []
    for pk, amount in sorted(amounts.items()):
        line = lines[pk]
        remaining = line.amount_minor + line.corrected
        if not 0 < amount <= remaining:
            raise InvoiceRefused(
                _("The amount of line %(line)d must be at most %(left)s.")
                % {"line": line.position, "left": money(remaining, invoice.currency)}
            )
        # On an invoice `credit_minor` is 0 or less; on notes, which `corrected_credit` sums, it is 0 or more.
        paid_remaining = remaining + line.credit_minor + line.corrected_credit
        paid = min(amount, paid_remaining)
        parts.append(ReturnedPart(line, paid, amount - paid))
    return parts


def _post_tax(invoice: Invoice) -> None:
    """Post an invoice's tax as a liability to the tax office."""
    if not invoice.tax_minor:
        return
    tax_office = ledger.platform_account(Account.Kinds.TAX, invoice.currency)
    if invoice.tax_inclusive:
        revenue = ledger.platform_account(Account.Kinds.REVENUE, invoice.currency)
        entries = [(revenue, -invoice.tax_minor), (tax_office, invoice.tax_minor)]
    else:
        wallet = _locked_wallet(invoice.organization)
        paid = min(invoice.tax_minor, credit.paid_minor(wallet))
        debt = ledger.receivable_account(wallet)
        # A debt is a negative balance.
        entries = [(wallet, -paid), (debt, paid - invoice.tax_minor), (tax_office, invoice.tax_minor)]
    ledger.post(
        reference=f"tax:{invoice.kind}:{invoice.sequence}",
        kind="tax",
        description=gettext_noop("Tax on an invoice"),
        entries=entries,
    )


def _post_note(note: Invoice) -> None:
    """Return a note's amount from revenue and tax liability to the wallet, then collect debts from the wallet."""
    wallet = _locked_wallet(note.organization)
    # A note's total and tax are negative. Its total excludes credit, which also returns to the wallet.
    returned = -note.total_minor + note.credits_minor
    revenue = ledger.platform_account(Account.Kinds.REVENUE, note.currency)
    tax_office = ledger.platform_account(Account.Kinds.TAX, note.currency)
    ledger.post(
        reference=f"credit-note:{note.sequence}",
        kind="credit-note",
        description=f"{note.number}: {note.reason}"[:255],
        entries=[(wallet, returned), (revenue, -returned - note.tax_minor), (tax_office, note.tax_minor)],
    )
    if note.credits_minor:
        credit.add_correction(organization=note.organization, amount_minor=note.credits_minor, reason=note.reason)
    receivables.collect(account=wallet, reference=f"credit-note:{note.sequence}")


def _locked_wallet(organization: Organization) -> Account:
    """Return the wallet, locked FOR NO KEY UPDATE, which does not block inserts that reference the account."""
    return Account.objects.select_for_update(no_key=True).get(organization=organization, kind=Account.Kinds.WALLET)


def _locked_series(kind: Invoice.Kinds) -> InvoiceSeries:
    """Return the number series, locked until the transaction ends so that documents are issued one at a time."""
    InvoiceSeries.objects.bulk_create([InvoiceSeries(kind=kind)], ignore_conflicts=True)
    return InvoiceSeries.objects.select_for_update().get(kind=kind)


def _next_number(series: InvoiceSeries) -> int:
    """Return the next number of a locked series."""
    series.last += 1
    InvoiceSeries.objects.filter(pk=series.pk).update(last=F("last") + 1)
    return series.last


def _uninvoiced() -> QuerySet[Receipt]:
    """Return the receipts that are on no invoice."""
    return Receipt.objects.filter(invoice_line=None)


def _seller() -> dict[str, str]:
    """Return the seller's details. The document stores this copy, so later changes do not alter it."""
    billing_policy = policy()
    return {
        "name": billing_policy.seller_name or "Trainyard",
        "address": billing_policy.seller_address,
        "tax_id": billing_policy.seller_tax_id,
        "footer": billing_policy.footer,
    }


def _customer(organization: Organization) -> dict[str, str]:
    """Return the customer's details. The document stores this copy, so later changes do not alter it."""
    details = BillingDetails.objects.filter(organization=organization).first() or BillingDetails()
    return {
        "name": details.name or organization.name,
        "address": details.address,
        "tax_id": details.tax_id,
        "tax_note": details.tax_note,
    }
